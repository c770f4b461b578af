"""What an evaluation leaves behind beside its metrics is told of: each worker has measured its own samples."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from paceline import Mean, Run
from paceline.observe import Note
from tests.unit.training.own_runs import data, losses, opened, prepared


class Beside:
    """What metrics of a loop may reach."""

    def __init__(self) -> None:
        self.worst, self.seen, self.shown = 0.0, [0.0], torch.zeros(2)
        self.done = False
        self.sums = torch.zeros(())
        self.teacher = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


def remember(beside: Any, _: nn.Module, error: torch.Tensor, batch: Any) -> None:
    beside.worst = max(beside.worst, float(error.max()))


def collect(beside: Any, _: nn.Module, error: torch.Tensor, batch: Any) -> None:
    beside.seen.append(float(error.sum()))


def add(beside: Any, _: nn.Module, error: torch.Tensor, batch: Any) -> None:
    beside.sums += error.sum()


def teach(beside: Any, _: nn.Module, error: torch.Tensor, batch: Any) -> None:
    beside.teacher(batch[0])


def switch(beside: Any, _: nn.Module, error: torch.Tensor, batch: Any) -> None:
    beside.teacher.eval()


def log(beside: Any, model: nn.Module, error: torch.Tensor, batch: Any) -> None:
    beside.shown, beside.done = error, True
    model.eval()


def notes(run: Run, change: Callable[..., None], evaluations: int) -> list[str]:
    heard: list[str] = []
    state = run._engine.state
    told = state.emit
    state.emit = lambda event: heard.append(event.text) if isinstance(event, Note) else told(event)  # type: ignore[method-assign]
    prepared(run)
    beside = Beside()

    def metrics(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, Mean]:
        error = losses(model, batch)
        change(beside, model, error, batch)
        return {"error": Mean(error.sum(), len(error))}

    for _ in range(evaluations):
        run.evaluate(data(), metrics, batch_size=8)
    return heard


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (remember, "beside.worst"),
        (collect, r"len\(beside.seen\)"),
        (add, "beside.sums"),
        (teach, r"beside.teacher.1\.\w+"),
        (switch, r"beside.teacher\.training"),
    ],
)
def test_it_is_told_of_once(change: Callable[..., None], name: str) -> None:
    with opened(shards=2) as run:
        [note] = notes(run, change, 5)
    assert re.search(f"changes {name}, and leaves it so", note)


def test_what_does_no_harm_is_left_alone() -> None:
    with opened(shards=2) as run:
        assert notes(run, log, 5) == []


def test_an_evaluation_that_fails_leaves_nothing_alive() -> None:
    class Measure:
        def __call__(self, model: nn.Module, batch: list[torch.Tensor]) -> dict[str, Mean]:
            raise ValueError("no metric")

    with opened(shards=2) as run:
        prepared(run)
        measure = Measure()
        gone = weakref.ref(measure)
        with pytest.raises(ValueError, match="no metric"):
            run.evaluate(data(), measure, batch_size=8)
        del measure
        gc.collect()
        assert gone() is None
