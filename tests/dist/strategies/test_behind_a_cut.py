"""What a forward pass does behind a cut to what came over it: one process's bits, or one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline
from paceline import Loss, Mean
from paceline.errors import InputError
from paceline.strategies.structure import Structure
from tests.dist.strategies.kinds import launched


class Halved(nn.Module):
    """Two blocks, the second of which is handed the products of the first, once more under another name."""

    def __init__(self, again: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.again = again
        self.blocks = nn.ModuleList([nn.Linear(6, 6), Added()])

    def forward(self, features: Tensor) -> Tensor:
        """Return as many numbers as the batch has."""
        hidden = self.blocks[0](features)
        return self.blocks[1](hidden, self.again(hidden))  # type: ignore[no-any-return]


class Added(nn.Module):
    """Writes into the first and reads the second."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 6)

    def forward(self, hidden: Tensor, again: Tensor) -> Tensor:
        """Return a sum."""
        return self.last(F.relu(hidden, inplace=True) + again.view_as(hidden)) + again.view_as(hidden)  # type: ignore[no-any-return]


class Later(nn.Module):
    """Writes, behind a cut, into what it has handed to the module at the cut."""

    def __init__(self) -> None:
        super().__init__()
        wide = nn.Sequential(nn.Linear(6, 64), nn.Linear(64, 6))  # half of the work: the cut comes behind it
        self.blocks = nn.ModuleList([wide, nn.Linear(6, 6), nn.Linear(6, 6)])

    def forward(self, features: Tensor) -> Tensor:
        """Return as many numbers as the batch has."""
        handed = self.blocks[0](features) * 1.0
        made = self.blocks[1](handed)
        handed.mul_(2)
        return made + self.blocks[2](handed)  # type: ignore[no-any-return]


class Taught(nn.Module):
    """A student, and a frozen teacher whose products are returned beside its own."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.order = order
        self.student, self.teacher = row(nn.Tanh()), row(nn.Tanh()).requires_grad_(False)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores of both."""
        with torch.no_grad():
            wanted = self.teacher(features)
        return self.student(features), wanted


def row(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), *between, nn.Linear(6, 6))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "in place": lambda: row(nn.ReLU(inplace=True)),
    "with statistics": lambda: row(nn.BatchNorm1d(6), nn.ReLU(inplace=True)),
    "twice": lambda: Halved(lambda hidden: hidden),
    "a view": lambda: Halved(lambda hidden: hidden.view(-1)),
    "later": Later,
    "two rows": lambda: Taught("before"),
    "unread": lambda: Taught("before"),
    "only that": lambda: Taught("before"),
}
CUTS = {"in place": ["1"], "with statistics": ["2"], "later": ["blocks.1", "blocks.2"]}
READ: dict[str, Callable[[Any], Tensor]] = {
    "two rows": lambda made: made[0] - made[1],
    "unread": lambda made: made[0],
    "only that": lambda made: made[1],
}


def train_one(run: paceline.Run, kind: str) -> Any:
    data = TensorDataset(torch.randn(32, 6, generator=torch.Generator().manual_seed(1)))
    torch.manual_seed(3)
    run.prepare(
        MODELS[kind](),
        lambda model: torch.optim.AdamW(model.parameters(), lr=0.05),
        structure=Structure(stages=CUTS.get(kind)),
        buffers={"*running*": "mean", "*num*": "first"} if kind == "with statistics" else {},
    )

    def squares(model: Any, batch: list[Tensor]) -> Tensor:
        return READ.get(kind, lambda made: made)(model(batch[0])).square().sum(1)

    for step in run.steps(data, batch_size=8, epochs=1):
        step.compute(lambda model, batch: Loss.mean(squares(model, batch)))
    measured = run.evaluate(
        data,
        lambda model, batch: {"squares": Mean(squares(model, batch).double().sum(), 1)},
        batch_size=16,
    )
    return {
        name: value.clone() for name, value in run._engine.state.replica.state()["model"].items()
    }, measured


def test_what_came_over_a_cut_may_be_written_to() -> None:
    kinds = ["in place", "with statistics", "twice", "unread"]
    one, two = launched(train_one, "single", 1, kinds), launched(train_one, "pp", 2, kinds)
    for kind in kinds:
        assert all(torch.equal(two[kind][0][name], value) for name, value in one[kind][0].items()), kind
        assert two[kind][1] == one[kind][1], kind


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("a view", "writes, after a cut of the pipeline"),
        ("later", "writes, after a cut of the pipeline"),
        ("two rows", "made before it"),
        ("only that", "made before it"),
    ],
)
def test_what_would_be_another_answer_is_refused(kind: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        launched(train_one, "pp", 2, [kind])
