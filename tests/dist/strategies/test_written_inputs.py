"""A forward pass that writes into its own arguments, and a loss that reads them behind it: one process's bits, or one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline import Loss, Mean
from paceline.errors import InputError
from paceline.strategies.structure import Structure
from tests.dist.strategies.kinds import launched


class Net(nn.Module):
    """Two blocks; the batch is written to before the first, before the second, or behind both."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.when, self.blocks = when, nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, batch: Any) -> Tensor:
        """Return as many numbers as the batch has."""
        features = batch["features"] if isinstance(batch, dict) else batch
        FIRST.get(self.when, lambda _: None)(batch)
        hidden = features * 1.0
        for number, block in enumerate(self.blocks):
            if number and self.when == "between":
                features.mul_(2)
            hidden = torch.tanh(block(hidden))
        BEHIND.get(self.when, lambda _: None)(batch)
        return hidden


def assign(batch: Any) -> None:
    batch["features"].data = batch["features"].data * 2


def through_numpy(features: Tensor) -> None:
    if not features.is_meta:
        features.numpy()[:] *= 2


def count(batch: Any) -> None:
    batch["scale"] += 1.0


FIRST: dict[str, Callable[[Any], Any]] = {
    "first": lambda batch: batch.mul_(2),
    "past the count": lambda batch: batch.data.mul_(2),
    "numpy": through_numpy,
    "assigned": assign,
    "a number": count,
    "an object": lambda batch: setattr(batch["box"], "scale", 3.0),
}
"""What the forward pass does to its argument before its first layer."""
BEHIND: dict[str, Callable[[Any], Any]] = {
    "behind": lambda batch: batch.mul_(2),
    "put": lambda batch: batch.update(features=batch["features"] * 2),
}
DICTS = {"put", "assigned", "a number", "an object", "an object in a row"}


class ChunkBounds:
    """What torch takes for one thing."""

    def __init__(self) -> None:
        self.scale = 1.0


class Mark(nn.Module):
    """Sets a member of its argument."""

    def forward(self, batch: Any) -> Tensor:
        """Return the numbers in it."""
        batch["box"].scale = 3.0
        return batch["features"]  # type: ignore[no-any-return]


class Double(nn.Module):
    """Writes into what it is given."""

    def __init__(self, *, past: bool = False) -> None:
        super().__init__()
        self.past = past

    def forward(self, features: Tensor) -> Tensor:
        """Return the same memory."""
        (features.data if self.past else features).mul_(2)
        return features


def make(kind: str) -> nn.Module:
    if kind == "row":
        return nn.Sequential(Double(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    if kind == "an object in a row":
        return nn.Sequential(Mark(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    if kind in ("handed on", "handed on, past the count"):
        return nn.Sequential(nn.Identity(), Double(past="past" in kind), nn.Linear(6, 6))
    return Net(kind)


def train_one(run: paceline.Run, kind: str) -> Any:
    data = TensorDataset(torch.randn(32, 6, generator=torch.Generator().manual_seed(1)))
    torch.manual_seed(3)
    stages = ["1"] if "handed on" in kind else None  # the batch itself crosses the cut
    run.prepare(
        make(kind),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
        structure=Structure(stages=stages),
    )

    def apart(model: Any, batch: list[Tensor]) -> Tensor:
        if kind not in DICTS:
            return model(batch[0]) - batch[0]  # type: ignore[no-any-return]
        given: Any = {"features": batch[0], "scale": 1.0, "box": ChunkBounds()}
        scores = model(given)
        return scores * (given["scale"] * given["box"].scale) - given["features"]  # type: ignore[no-any-return]

    for step in run.steps(data, batch_size=8, epochs=1):
        step.compute(lambda model, batch: Loss.mean(apart(model, batch).square().sum(1)))
    measured = run.evaluate(
        data, lambda model, batch: {"apart": Mean(apart(model, batch).double().sum(), 1)}, batch_size=16
    )
    return {
        name: value.clone() for name, value in run._engine.state.replica.state()["model"].items()
    }, measured


def test_what_the_first_stage_writes_reaches_the_loss() -> None:
    kinds = ["first", "between", "row", "past the count", "numpy", "assigned", "an object"]
    one, two = launched(train_one, "single", 1, kinds), launched(train_one, "pp", 2, kinds)
    for kind in kinds:
        assert all(torch.equal(two[kind][0][name], value) for name, value in one[kind][0].items()), kind
        assert two[kind][1] == one[kind][1], kind


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("behind", "after a cut"),
        ("handed on, past the count", "after a cut"),
        ("put", "after a cut"),
        ("a number", "into the batch"),
        ("an object in a row", "into the batch"),
    ],
)
def test_what_would_be_lost_is_refused(kind: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        launched(train_one, "pp", 2, [kind])
