"""A model that a loop changes behind a step: one process's bits and its names in the state, or one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline import Loss
from tests.dist.strategies.scenarios import Outcome

DATA = TensorDataset(torch.randn(32, 6, generator=torch.Generator().manual_seed(1)))


def net() -> nn.Sequential:
    """Return a model with a buffer: one without any may not be given one later."""
    made = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 1))
    made.register_buffer("count", torch.zeros(1))
    return made


def hook(model: Any) -> None:
    list(model.parameters())[-2].register_hook(lambda gradient: gradient * 0.5)


CHANGES: dict[str, Callable[[Any], None]] = {"hook": hook}
UNCHANGED = "hook before"


def train_one(run: paceline.Run, kind: str) -> dict[str, Tensor]:
    torch.manual_seed(3)
    model, _ = run.prepare(net(), lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    if kind == "hook before":
        hook(model)
    for step in run.steps(DATA, batch_size=8, epochs=1):
        step.compute(lambda model, batch: Loss.mean((model(batch[0]) - 1).square().sum(1)))
        if step.number == 1 and kind in CHANGES:
            CHANGES[kind](model)
    return {name: value.clone() for name, value in run._engine.state.replica.state()["model"].items()}


def work(run: paceline.Run, kinds: list[str]) -> dict[str, Outcome]:
    made: dict[str, Outcome] = {}
    for kind in kinds:
        own = paceline.Run(run.world, run._engine.state.options)
        try:
            made[kind] = train_one(own, kind)
        except paceline.InputError as error:
            made[kind] = str(error)
    return made


def train(strategy: str, kinds: list[str], **options: Any) -> list[dict[str, Outcome]]:
    workers = {"single": 1, "ps": 2}.get(strategy, 2)
    options = {"shards": 2, "threads": 1, "find_unused_parameters": True, **options}
    return list(paceline.launch(work, kinds, strategy=strategy, workers=workers, **options))


@pytest.mark.parametrize("strategy", ["fsdp", "tp"])
def test_a_hook_on_a_parameter_is_refused_where_passes_compute_with_others(strategy: str) -> None:
    for found in train(strategy, ["hook", "hook before"]):
        for kind, told in found.items():
            assert "4.weight has a hook (register_hook)" in str(told), kind
