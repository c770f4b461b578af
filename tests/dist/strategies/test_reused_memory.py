"""Models and losses that write into the same memory in each pass, while what is there may still be needed: one process's bits."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import paceline
from paceline import Loss, Mean
from paceline.errors import InputError
from paceline.strategies.data_parallel import dp
from paceline.strategies.structure import Structure
from paceline.strategies.tuning import Tuning
from tests.dist.strategies.kinds import TrainOne, launched, train_each

WIDE = 1 << 15
"""Numbers of a sample that passes from stage to stage: more than the sockets hold, so that it leaves only when it is received."""


class Scratch(nn.Module):
    """Keeps the memory of its output, and writes into it again."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.out = how, torch.empty(8, WIDE)
        self.weight = nn.Parameter(torch.randn(6, WIDE), requires_grad=how == "copied into")

    def forward(self, values: Tensor) -> Tensor:
        """Return a product that lies in it: always, or in evaluation only."""
        out = self.out.detach()[: len(values)]
        if self.how == "copied into":
            return out.copy_(values @ self.weight)
        if self.how == "in evaluation" and torch.is_grad_enabled():
            return values @ self.weight
        with torch.no_grad():
            return torch.mm(values, self.weight, out=out)


class _Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        time.sleep(0.01)
        return gradients[0]


class Late(nn.Module):
    """Goes back late, so that messages to it wait."""

    def forward(self, values: Tensor) -> Tensor:
        """Return what came."""
        return _Late.apply(values)  # type: ignore[no-any-return, no-untyped-call]


class _Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, memory: Tensor) -> Tensor:
        ctx.memory, ctx.rows = memory, len(values)
        return values / 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        torch.mul(gradients[0], 0.5, out=ctx.memory[: ctx.rows])
        return ctx.memory[: ctx.rows], None


class Halved(nn.Module):
    """Writes gradients into memory that it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = torch.empty(8, WIDE)

    def forward(self, values: Tensor) -> Tensor:
        """Return the halves."""
        return _Halved.apply(values, self.memory)  # type: ignore[no-any-return, no-untyped-call]


class Masked(nn.Module):
    """Two blocks that are both handed a mask; the first may be computed once more in the backward pass."""

    def __init__(self, *, again: bool = False) -> None:
        super().__init__()
        self.again, self.blocks = again, nn.ModuleList(MaskedBlock() for _ in range(2))

    def forward(self, values: Tensor, mask: Tensor) -> Tensor:
        """Return as many numbers as came."""
        first, second = self.blocks
        if self.again:
            hidden = checkpoint(
                lambda values, mask: first(values, mask=mask), values, mask, use_reentrant=False
            )
        else:
            hidden = first(values, mask=mask)
        made: Tensor = second(hidden, mask=mask)
        return made


class MaskedBlock(nn.Module):
    """A layer behind a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, values: Tensor, *, mask: Tensor) -> Tensor:
        """Return as many numbers as came."""
        return torch.tanh(self.linear(values * mask[:, :6])) * mask[:, :6]


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{
        how: lambda how=how: nn.Sequential(Scratch(how), nn.Linear(WIDE, 6))  # type: ignore[misc]
        for how in ("always", "in evaluation", "copied into")
    },
    "a gradient": lambda: nn.Sequential(
        nn.Sequential(nn.Linear(6, WIDE), Late()), Halved(), nn.Linear(WIDE, 6)
    ),
    "a mask": Masked,
    "a mask of a block that is computed again": lambda: Masked(again=True),
}
OUTPUTS = ["always", "in evaluation", "copied into", "a gradient"]
"""Models of which the first member is the first stage."""
LOSSES = ["weights", "inputs", "a view of a tensor"]


class Losses:
    """A loss with an array of its own, into which each call writes."""

    def __init__(self, kind: str) -> None:
        self.kind, self.tensor = kind, torch.zeros(8, WIDE if "mask" in kind else 6)
        self.array = self.tensor.numpy() if kind == "a view of a tensor" else np.zeros((8, 6), np.float32)

    def __call__(self, model: Any, batch: list[Tensor]) -> Loss:
        """Return the squares."""
        return Loss.mean(self.errors(model, batch).square().sum(1))

    def errors(self, model: Any, batch: list[Tensor]) -> Tensor:
        """Return one row for each sample."""
        values, wanted = batch
        rows = slice(0, len(values))
        if "mask" in self.kind:
            self.tensor.numpy()[rows] = np.abs(values.numpy()[:, :1])
            return model(values, self.tensor[rows]) - wanted  # type: ignore[no-any-return]
        np.abs(values.numpy(), out=self.array[rows])
        if self.kind == "inputs":
            return model(torch.from_numpy(self.array[rows])) - wanted  # type: ignore[no-any-return]
        errors: Tensor = model(values) - wanted
        if self.kind == "weights":
            errors = errors * torch.from_numpy(self.array[rows])
        elif self.kind == "a view of a tensor":
            errors = errors * self.tensor[rows]
        elif self.kind == "counted":
            errors = errors * self.tensor[rows].copy_(values.abs())
        return errors


def train_one(run: paceline.Run, kind: str) -> Any:
    source = torch.Generator().manual_seed(1)
    data = TensorDataset(*torch.randn(2, 64, 6, generator=source))
    torch.manual_seed(3)
    run.prepare(
        MODELS.get(kind, plain)(),
        lambda model: torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=1e-6),
        structure=Structure(stages=["1"] if kind in OUTPUTS else None),
    )
    loss = Losses(kind)
    for step in run.steps(data, batch_size=32, epochs=1):
        step.compute(loss)
    measured = run.evaluate(
        data,
        lambda model, batch: {"errors": Mean(loss.errors(model, batch).double().sum(), 1)},
        batch_size=32,
    )
    return {
        name: value.clone() for name, value in run._engine.state.replica.state()["model"].items()
    }, measured


def train_slowly(run: paceline.Run, train_one: TrainOne, kinds: list[str]) -> dict[str, Any]:
    """Train with backward passes on threads that begin late."""
    real = dp.gradients.of_leaves

    def late(*args: Any) -> Any:
        time.sleep(0.01)
        return real(*args)

    dp.gradients.of_leaves = late
    try:
        return train_each(run, train_one, kinds)
    finally:
        dp.gradients.of_leaves = real


def differing(one: dict[str, Any], many: dict[str, Any]) -> list[str]:
    return [
        kind
        for kind, (weights, measured) in many.items()
        if measured != one[kind][1]
        or not all(torch.equal(weights[name], value) for name, value in one[kind][0].items())
    ]


@pytest.fixture(scope="module")
def single() -> dict[str, Any]:
    made: dict[str, Any] = launched(
        train_one, "single", 1, [*OUTPUTS, "a mask", *LOSSES, "counted"], shards=8
    )
    return made


def test_outputs_of_a_stage_leave_as_they_were(single: dict[str, Any]) -> None:
    assert (
        differing(single, launched(train_one, "pp", 2, OUTPUTS, shards=8, tuning=Tuning(schedule="gpipe")))
        == []
    )


@pytest.mark.parametrize("schedule", ["gpipe", "zero-bubble"])
def test_what_a_stage_has_saved_is_what_it_was(single: dict[str, Any], schedule: str) -> None:
    kinds = ["a mask", *LOSSES]
    made = launched(
        train_one, "pp", 2, kinds, shards=8, tuning=Tuning(schedule=schedule, stages_per_worker=1)
    )
    assert differing(single, made) == []


def test_a_block_that_is_computed_again_gets_what_it_was_given() -> None:
    kinds = ["a mask of a block that is computed again"]
    made = launched(train_one, "pp", 2, kinds, shards=8, tuning=Tuning(schedule="gpipe"))
    assert differing(launched(train_one, "single", 1, kinds, shards=8), made) == []


def test_threads_go_back_through_what_was_saved(single: dict[str, Any]) -> None:
    made = launched(train_one, "dp", 2, LOSSES, shards=8, job=train_slowly)
    assert differing(single, made) == []


def test_writes_that_torch_counts_are_refused_in_one_line() -> None:
    with pytest.raises(InputError, match="Under dp the passes of the batches that follow"):
        launched(train_one, "dp", 2, ["counted"], shards=8, job=train_slowly)
    with pytest.raises(InputError, match="Under pp other batches"):
        launched(train_one, "pp", 2, ["counted"], shards=8, tuning=Tuning(schedule="gpipe"))
