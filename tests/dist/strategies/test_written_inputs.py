"""A forward pass that writes into its own arguments, and a loss that reads them behind it: one process's bits, or one line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline import Loss, Mean
from paceline.errors import InputError
from paceline.strategies.structure import Structure


class Net(nn.Module):
    """Two blocks; the batch is written to before the first, before the second, or behind both."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.when, self.blocks = when, nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, batch: Any) -> Tensor:
        """Return as many numbers as the batch has."""
        features = batch["features"] if isinstance(batch, dict) else batch
        if self.when == "first":
            features.mul_(2)
        hidden = features * 1.0
        for number, block in enumerate(self.blocks):
            if number and self.when == "between":
                features.mul_(2)
            hidden = torch.tanh(block(hidden))
        if self.when == "behind":
            features.mul_(2)
        if self.when == "put":
            batch["features"] = hidden.detach()
        return hidden


class Double(nn.Module):
    """Writes into what it is given."""

    def forward(self, features: Tensor) -> Tensor:
        """Return the same memory."""
        return features.mul_(2)


def make(kind: str) -> nn.Module:
    if kind == "row":
        return nn.Sequential(Double(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    if kind == "handed on":
        return nn.Sequential(nn.Identity(), Double(), nn.Linear(6, 6))
    return Net(kind)


def train(run: paceline.Run, kinds: list[str]) -> dict[str, Any]:
    """Train a model of each kind, one after the other."""
    made: dict[str, Any] = {}
    for kind in kinds:
        own = paceline.Run(run.world, run.options)
        made[kind] = _train_one(own, kind)
        own.replica.abandon()
    return made


def _train_one(run: paceline.Run, kind: str) -> Any:
    data = TensorDataset(torch.randn(32, 6, generator=torch.Generator().manual_seed(1)))
    torch.manual_seed(3)
    stages = ["1"] if kind == "handed on" else None  # the batch itself crosses the cut
    run.prepare(
        make(kind),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
        structure=Structure(stages=stages),
    )

    def apart(model: Any, batch: list[Tensor]) -> Tensor:
        given: Any = {"features": batch[0]} if kind == "put" else batch[0]
        scores = model(given)
        return scores - (given["features"] if kind == "put" else given)  # type: ignore[no-any-return]

    for step in run.steps(data, batch_size=8, epochs=1):
        step.compute(lambda model, batch: Loss.mean(apart(model, batch).square().sum(1)))
    measured = run.evaluate(
        data, lambda model, batch: {"apart": Mean(apart(model, batch).double().sum(), 1)}, batch_size=16
    )
    return {name: value.clone() for name, value in run.replica.state()["model"].items()}, measured


def launched(strategy: str, workers: int, kinds: list[str]) -> dict[str, Any]:
    made = paceline.launch(
        train, kinds, strategy=strategy, workers=workers, shards=4, threads=1, device="cpu", elastic=False
    )
    return made[0]  # type: ignore[no-any-return]


def test_what_the_first_stage_writes_reaches_the_loss() -> None:
    kinds = ["first", "between", "row"]
    one, two = launched("single", 1, kinds), launched("pp", 2, kinds)
    for kind in kinds:
        assert all(torch.equal(two[kind][0][name], value) for name, value in one[kind][0].items()), kind
        assert two[kind][1] == one[kind][1], kind


@pytest.mark.parametrize(
    ("kind", "words"), [("behind", "behind a cut"), ("handed on", "behind a cut"), ("put", "into the batch")]
)
def test_what_later_stages_write_is_refused(kind: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        launched("pp", 2, [kind])
