"""Options that make no sense are refused when they are made, and a level is never more than they leave of it."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.errors import InputError
from paceline.strategies import load
from paceline.strategies.base import Exactness
from paceline.strategies.tuning import Tuning


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"outer_lr": -1.0}, r"--outer-lr is -1\.0, but must be above 0"),
        ({"bucket_mb": float("nan")}, r"--bucket-mb is nan, but must be above 0"),
        ({"outer_momentum": 1.0}, r"--outer-momentum is 1\.0, but must be at least 0 and less than 1"),
    ],
)
def test_numbers_out_of_range(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Tuning(**given)


@pytest.mark.parametrize("strategy", ["ddp", "tp"])
def test_what_compression_leaves_of_a_promise(strategy: str) -> None:
    assert load(strategy).level(Tuning(compress="powersgd:2")) is Exactness.STATISTICAL
    assert load(strategy).level(Tuning(compress="bf16")) is Exactness.NUMERIC
