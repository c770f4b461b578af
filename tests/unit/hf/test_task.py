"""What a Task of a transformers model may be given."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="the extra hf is not installed")

from paceline import Average, Best, EarlyStopping, hf
from paceline.errors import InputError


def test_a_task_takes_what_any_task_may_set() -> None:
    given = {
        "batch_size": 8,
        "eval_every": 50,
        "early_stopping": EarlyStopping("loss", mode="min"),
        "keep_best": Best("loss", mode="min"),
        "average": Average(0.9),
    }
    made = hf.task(model=None, train=[], **given)
    assert {name: getattr(made, name) for name in given} == given
    with pytest.raises(InputError, match="Did you mean 'eval_every'"):
        hf.task(model=None, train=[], eval_evry=50)
