"""A run stands at one place: calls of run.steps that are nested or zipped would count each other's steps, so they are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.errors import InputError


def rows(seed: int) -> TensorDataset:
    return TensorDataset(torch.randn(24, 4, generator=torch.Generator().manual_seed(seed)))


def losses(model: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = model(x).square().flatten()
    return found


def take(model: nn.Module, step: Any) -> None:
    for (x,) in step:
        step.backward(losses(model, x))
    step.apply()


def nested(run: paceline.Run, model: nn.Module, *_: Any) -> None:
    for step in run.steps(rows(0), batch_size=8, epochs=2):
        take(model, step)
        for inner in run.steps(rows(1), batch_size=8, epochs=1):
            take(model, inner)


def zipped(_: paceline.Run, model: nn.Module, first: Any, second: Any) -> None:
    for one, other in zip(first, second, strict=True):
        take(model, one)
        take(model, other)


def batches_zipped(_: paceline.Run, model: nn.Module, first: Any, second: Any) -> None:
    for one, other in zip(first, second, strict=True):
        for (x,), (y,) in zip(one, other, strict=True):
            one.backward(losses(model, x) + losses(model, y))
        one.apply()


def one_behind_the_other(_: paceline.Run, model: nn.Module, first: Any, second: Any) -> None:
    """Leave passes early, and let go of one that was left in the body of another one's step."""
    kept = []
    for epoch in range(2):
        passes = iter(first if epoch else second)
        kept.append(passes)
        take(model, next(passes))
        for step in first:
            for (x,) in step:
                step.backward(losses(model, x))
            for one in kept:
                one.close()
            step.apply()


def train(run: paceline.Run, loop: Callable[..., None]) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    loaders = (DataLoader(rows(seed), batch_size=8) for seed in (0, 1))
    model, _, first, second = run.prepare(model, optimizer, *loaders)
    loop(run, model, first, second)
    return run.weights_sha256()


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("loop", "said"),
    [(nested, "nested"), (zipped, "a zip of both"), (batches_zipped, "batches of another step")],
    ids=["nested", "zipped", "batches zipped"],
)
def test_two_calls_at_once_are_refused(loop: Callable[..., None], said: str, workers: int) -> None:
    with pytest.raises(InputError, match=said):
        paceline.launch(train, loop, workers=workers, shards=4, threads=1)


def test_a_pass_that_was_left_may_be_closed_later() -> None:
    alone = paceline.launch(train, one_behind_the_other, shards=4, threads=1)
    assert paceline.launch(train, one_behind_the_other, workers=2, shards=4, threads=1) == alone * 2
