"""What a loop sets of its optimizer is alike on all workers, whatever batches they have, or it is refused: no weights tell."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import InputError

LOCAL = "updated their parts of the weights with different options"
EACH = "changes the optimizer's"
TICK = "calls step() of the ExponentialLR"


class Loop:
    """The objects of one loop, and what a habit of it does with them."""

    def __init__(self, run: paceline.Run) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        self.model, self.optimizer = run.prepare(model, optimizer)
        schedules = torch.optim.lr_scheduler
        self.plateau = run.register(
            "plateau", schedules.ReduceLROnPlateau(self.optimizer, patience=0, threshold=0.0)
        )
        self.decay = run.register("decay", schedules.ExponentialLR(self.optimizer, 0.9))
        self.losses = torch.zeros(1)
        self.number = 0

    def set_rate(self, rate: float) -> None:
        self.optimizer.param_groups[0]["lr"] = rate

    def keep(self, value: object) -> None:
        self.optimizer.param_groups[0]["last_seen"] = value


def nothing(_: Loop) -> None: ...


def halve_momentum(loop: Loop) -> None:
    for entry in loop.optimizer.state.values():
        if entry.get("momentum_buffer") is not None:
            entry["momentum_buffer"].mul_(0.5)


def undone(loop: Loop) -> None:
    """Set a rate by the batch for one update; what it was at the end says nothing of that."""
    if loop.number == 1:
        loop.set_rate(0.05 + 0.01 * float(loop.losses.detach().mean()))


BEHIND: dict[str, tuple[Callable[[Loop], None], str]] = {
    "a plateau of its own losses": (lambda loop: loop.plateau.step(loop.losses.mean().item()), LOCAL),
    "a rate for one update": (undone, LOCAL),
    "a tick": (lambda loop: loop.decay.step(), ""),
    "a time of its own": (lambda loop: loop.keep(time.time()), ""),
    "a rate by the step": (lambda loop: loop.set_rate(0.1 / (1 + loop.number)), ""),
}
INSIDE: dict[str, tuple[Callable[[Loop], None], str]] = {
    "a tick a batch": (lambda loop: loop.decay.step(), TICK),
    "a factor a batch": (lambda loop: loop.set_rate(loop.optimizer.param_groups[0]["lr"] * 0.9), EACH),
    "momentum halved a batch": (halve_momentum, EACH),
    "a count of its own a batch": (lambda loop: loop.keep(time.time()), ""),
    "a rate by the step, inside": (lambda loop: loop.set_rate(0.1 / (1 + loop.number)), ""),
}
SAID = {name: said for name, (_, said) in (BEHIND | INSIDE).items()}


def train(run: paceline.Run, habit: str) -> str:
    loop = Loop(run)
    features = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
    inside, behind = INSIDE.get(habit, (nothing,))[0], BEHIND.get(habit, (nothing,))[0]
    for step in run.steps(TensorDataset(features), batch_size=8, epochs=2):
        loop.number = step.number
        for (x,) in step:
            loop.losses = loop.model(x).square().flatten()
            step.backward(loop.losses)
            inside(loop)
        if habit == "a rate for one update":
            loop.set_rate(0.05)
        behind(loop)
        step.apply()
    return run.weights_sha256()


def habits(run: paceline.Run) -> dict[str, str]:
    """Train once for each habit, and return what was said, or the weights."""
    made: dict[str, str] = {}
    for habit in SAID:
        own = paceline.Run(run.world, run._engine.state.options)
        try:
            made[habit] = train(own, habit)
        except InputError as error:
            made[habit] = str(error)
        run.world.comm.barrier()
        own._engine.state.replica.abandon()
    return made


@pytest.fixture(scope="module")
def alone() -> dict[str, str]:
    found: dict[str, str] = paceline.launch(habits, shards=4, threads=1)[0]
    for habit, said in SAID.items():  # one process has all batches, and only their number is wrong there
        for words in (EACH, TICK):
            assert (words in found[habit]) == (said == words), (habit, found[habit])
    return found


@pytest.mark.parametrize(
    "options",
    [{"strategy": "fsdp"}, {"strategy": "ddp", "shard_optimizer": True}, {"strategy": "ddp"}],
    ids=["fsdp", "zero-1", "ddp"],
)
def test_all_workers_update_alike_or_it_is_said(options: dict[str, Any], alone: dict[str, str]) -> None:
    whole = options == {"strategy": "ddp"}  # then the weights part
    for found in paceline.launch(habits, workers=2, shards=4, threads=1, **options):
        for habit, said in SAID.items():
            words = "differs between rank 0 and rank 1" if said == LOCAL and whole else said
            if words:
                assert words in found[habit], habit
            else:
                assert found[habit] == alone[habit], habit


def freezing(run: paceline.Run) -> str:
    loop = Loop(run)
    first: Any = loop.model[0]  # type: ignore[index]
    for step in run.steps(TensorDataset(torch.ones(16, 4)), batch_size=8, epochs=1):
        for (x,) in step:
            first.requires_grad_(False)
            losses: Tensor = loop.model(x).square().flatten()
            step.backward(losses)
            first.requires_grad_(True)
        step.apply()
    return run.weights_sha256()


def test_what_is_frozen_for_one_pass_under_fsdp_is_named() -> None:
    with pytest.raises(InputError, match=r"requires_grad of 0\.weight was changed in the middle of a step"):
        paceline.launch(freezing, workers=2, shards=4, threads=1, strategy="fsdp")
