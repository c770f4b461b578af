"""Models that could not be saved, or trained, are refused when they are prepared."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from paceline.checkpoint.formats import FORMATS, WRITTEN
from paceline.errors import InputError, PacelineError
from paceline.strategies.base import Exactness
from paceline.training.options import RunOptions
from paceline.training.strategy_inputs import new_parts, renewed_scaler
from tests.unit.training.own_runs import opened


class _Extra(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"passes": 0}


class _Twice(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("again", self.weight)


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize(
    ("model", "line"),
    [
        (
            nn.Linear(2, 2, dtype=torch.complex128),
            "weight is of type torch.complex128, which no checkpoint can hold",
        ),
        (_Extra(2, 2), "cannot hold _extra_state of the model's state: it is a dict, not a tensor"),
        (nn.Sequential(nn.LazyLinear(2)), "0.weight has no size yet"),
        (_Twice(2, 2), "the buffer again is the parameter weight"),
    ],
)
def test_a_model_that_could_not_be_saved_is_refused_at_once(
    model: nn.Module, line: str, given: bool, tmp_path: Path
) -> None:
    with pytest.raises(PacelineError, match=re.escape(line)):
        _prepare(model if given else lambda: model, tmp_path)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            ([nn.Linear(1, 1)], [None]),
            "given a list, which is no model, optimizer, schedule or DataLoader",
        ),
        (
            (nn.Linear(1, 1), ({},)),
            "given a tuple, which is no model, optimizer, schedule or DataLoader",
        ),
        (
            (nn.Linear(1, 1), lambda _: None, []),
            "several schedules as one ChainedScheduler or SequentialLR",
        ),
    ],
)
def test_several_models_are_told_where_to_go(given: Any, line: str) -> None:
    with opened() as run, pytest.raises(InputError, match=re.escape(line)):
        run.prepare(*given)


def test_what_is_never_saved_may_have_any_type() -> None:
    model = nn.Linear(2, 2, dtype=torch.complex128)
    assert _prepare(lambda: model, None) is model


def test_types_that_a_file_can_hold() -> None:
    held = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool, torch.int64)
    holds = FORMATS[WRITTEN].holds
    assert all(map(holds, held))
    assert not holds(torch.complex128)


def _prepare(model: Any, out: Path | None) -> nn.Module:
    options = RunOptions(out=out)
    cpu = torch.device("cpu")
    return new_parts(options, Exactness.BITWISE, cpu, model, lambda _: None, None, None, None).model  # type: ignore[arg-type,return-value]


def test_a_scaler_goes_on_without_the_step_that_broke() -> None:
    precision: Any = SimpleNamespace(scaler=lambda: torch.amp.GradScaler("cpu"))  # fp16 itself needs a GPU
    before, weight = precision.scaler(), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    before.scale((weight * 2).sum()).backward()
    before.update(512.0)
    before.unscale_(optimizer)
    renewed = renewed_scaler(precision, before)
    assert renewed is not None
    assert renewed.get_scale() == before.get_scale() == 512.0
    weight.grad = None
    renewed.scale((weight * 2).sum()).backward()
    renewed.unscale_(optimizer)  # which before refuses to do a second time in a step
