"""A task that keeps its model, and a loss that reads or sets plain attributes of it: one process's bits under pp, or one line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline import Loss, Mean
from paceline.errors import InputError
from tests.dist.strategies.kinds import launched


class Block(nn.Module):
    """A layer that leaves numbers of its pass behind."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.level, self.calls = nn.Linear(6, 6), 1.0, 0
        self.energy = torch.ones(())

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the output."""
        self.calls += 1
        made: Tensor = torch.tanh(self.linear(hidden))
        if not made.is_meta:
            self.level = float(made.detach().abs().mean())
        self.energy = made.square().mean()
        return made


class Net(nn.Module):
    """Two blocks, and the same numbers of the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.level, self.energy, self.scale, self.calls = 1.0, torch.ones(()), 1.0, 0

    def forward(self, hidden: Tensor) -> Tensor:
        """Return as many numbers as came."""
        self.calls += 1
        for block in self.blocks:
            hidden = torch.dropout(block(hidden) * self.scale, 0.1, self.training)
        if not hidden.is_meta:
            self.level = float(hidden.detach().abs().mean())
        self.energy = hidden.square().mean()
        return hidden


READS: dict[str, Any] = {
    "a number": lambda net: net.level,
    "a tensor": lambda net: net.energy.detach(),
    "a gradient": lambda net: net.energy,
    "the last block's": lambda net: net.blocks[1].level * net.blocks[1].energy,
    "the last layer's": lambda net: net[1].level * net[1].energy,
    "calls": lambda net: 1.0 + 0.1 * net.calls,
    "calls of the last block": lambda net: 1.0 + 0.1 * net.blocks[1].calls,
    "calls of the first block": lambda net: 1.0 + 0.1 * net.blocks[0].calls,
    "the first block's number": lambda net: net.blocks[0].level,
    "the first block's tensor": lambda net: net.blocks[0].energy,
    "the first layer's number": lambda net: net[0].level + 1,
}
RIGHT = [*READS][:8]
LOST = [*READS][8:]


def train_one(run: paceline.Run, kind: str) -> Any:
    data = TensorDataset(torch.randn(32, 6, generator=torch.Generator().manual_seed(1)))
    torch.manual_seed(3)
    net: Any = nn.Sequential(Block(), Block()) if "layer" in kind else Net()
    run.prepare(net, lambda model: torch.optim.SGD(model.parameters(), lr=0.05))

    def apart(model: Any, batch: list[Tensor]) -> Tensor:
        if kind == "set before":
            net.scale = 1.0 + float(batch[0][0, 0])
        scores = model(batch[0])
        if kind == "set behind":
            net.scale = 0.5
        return (scores - batch[0]) * READS.get(kind, lambda _: 1.0)(net)  # type: ignore[no-any-return]

    def metrics(model: Any, batch: list[Tensor]) -> dict[str, Mean]:
        values = apart(model, batch).double().sum()
        return {"apart": Mean(values + 100.0 * net.training, 1)}

    measured = []
    for step in run.steps(data, batch_size=8, epochs=1):
        step.compute(lambda model, batch: Loss.mean(apart(model, batch).square().sum(1)))
        if step.number == 1 and "calls" not in kind:  # an evaluation counts on
            measured.append(run.evaluate(data, metrics, batch_size=16))
        assert net.training
    return {
        name: value.clone() for name, value in run._engine.state.replica.state()["model"].items()
    }, measured


def test_what_the_last_stage_sets_is_there_when_the_loss_goes_on() -> None:
    kinds = [*RIGHT, "set before"]
    one, two = launched(train_one, "single", 1, kinds), launched(train_one, "pp", 2, kinds)
    wrong = [
        kind
        for kind in kinds
        if not all(torch.equal(two[kind][0][name], value) for name, value in one[kind][0].items())
        or two[kind][1] != one[kind][1]
    ]
    assert not wrong


@pytest.mark.parametrize("kind", LOST)
def test_a_read_of_what_another_stage_has_set_fails(kind: str) -> None:
    with pytest.raises(InputError, match=r"0\.(level|energy) was set .* in another stage"):
        launched(train_one, "pp", 2, [kind])


def test_what_a_loss_sets_behind_its_call_is_refused() -> None:
    with pytest.raises(InputError, match="the loss changes scale of the model after its call"):
        launched(train_one, "pp", 2, ["set behind"])
