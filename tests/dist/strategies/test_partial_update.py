"""Optimizers that look further than what one worker updates: one process's bits, or one line, on every strategy."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

import paceline
from paceline import strategies
from paceline.errors import InputError
from paceline.strategies.base import Exactness, Parts, ShardWork, StepWork
from paceline.strategies.precision import Precision
from paceline.strategies.tuning import Tuning
from paceline.training.preparing import structure_of
from paceline.world import determinism, seeds
from paceline.world.interruption import InterruptedWaitError
from tests.dist.strategies import own_optimizers as own
from tests.dist.strategies.ordinary import Made

STEPS = 3
ACROSS = "may look across"
HOOK = "has a hook of register_{}, and here each worker's step sees some of the gradients only"


@dataclass(frozen=True)
class Case:
    """An optimizer, what the loop does to it between two steps, and what is said of it where workers update parts."""

    optimizer: Any = own.Warm
    meddle: own.Meddle = lambda *_: None
    refused: str = ""
    by: tuple[str, ...] = ("zero", "fsdp", "pp", "ps", "tp")
    """Who says so; single trains everything."""


CASES = {
    "a norm of all gradients": Case(own.GlobalNorm, refused=ACROSS),
    "torch's step behind one of its own": Case(own.Clipping, refused=ACROSS),
    "what torch's step calls": Case(own.Clumped, refused=ACROSS),
    "a norm of one parameter": Case(own.Lars, refused=ACROSS, by=("fsdp", "tp")),
    "one number at a time": Case(own.Lion),
    "a constructor of its own": Case(own.Warm),
    "a hook before": Case(meddle=own.hook_before, refused=HOOK.format("step_pre_hook")),
    "a hook behind": Case(meddle=own.hook_behind, refused=HOOK.format("step_post_hook")),
    "a hook of all before": Case(meddle=own.hook_of_all_before, refused=HOOK.format("optimizer_step_pre_hook")),
    "a hook of all behind": Case(meddle=own.hook_of_all_behind, refused=HOOK.format("optimizer_step_post_hook")),
    "a hook that says it is harmless": Case(meddle=own.harmless_hook),
    "a step in the place of torch's": Case(meddle=own.patched_step, refused=ACROSS),
}  # fmt: skip


def train(run: paceline.Run, strategy: str, shards: int, tuning: Tuning) -> dict[str, Any]:
    """Train all cases, one after the other, in one group of workers."""
    determinism.select_kernels(run.world.device, compiled=False)
    return {name: _train_one(run, name, strategy, shards, tuning) for name in CASES}


def _train_one(run: paceline.Run, name: str, strategy: str, shards: int, tuning: Tuning) -> Any:
    case, world = CASES[name], run.world
    task = Made(optimizer=case.optimizer)
    if world.store is not None:  # servers meet their trainers there anew
        world = replace(world, store=dist.PrefixStore(name, world.store))

    def make() -> nn.Module:
        seeds.seed_everything(7)
        return task.model()

    parts = Parts(
        make_model=make,
        make_optimizer=task.optimizer,
        make_scheduler=_slower,
        precision=Precision("fp32", world.device),
        shards=shards,
        exactness=Exactness.BITWISE,
        structure=structure_of(task),
        tuning=tuning,
        remakes=True,
    )
    replica = None
    try:
        replica = strategies.load(strategy).prepare(parts, world)
        feed = run.feed(task.train_data(), batch_size=task.batch_size)
        for data in islice(feed.epoch(0), STEPS):
            case.meddle(data.step, replica.model, replica.optimizer)
            replica.step(_work(data), task.loss, None)
        return {key: value.clone() for key, value in replica.state()["model"].items()}
    except (InputError, InterruptedWaitError) as error:  # the second on a server whose trainers refused
        return str(error)
    finally:
        for hook in own.GLOBAL:
            hook.remove()
        own.GLOBAL.clear()
        if replica is not None:
            replica.abandon()


def _slower(optimizer: Optimizer) -> Any:
    """Wrap the optimizer's step, as every schedule of torch does."""
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)


def _work(data: Any) -> StepWork:
    shards = [
        ShardWork(one.index, seeds.derive(0, "shard", data.step, one.index), one.samples, one.batches)
        for one in data.shards
    ]
    return StepWork(data.step, data.size, shards)


def launched(strategy: str, workers: int, tuning: Tuning | None = None, **options: Any) -> dict[str, Any]:
    shards = 4
    first, *_ = paceline.launch(
        train,
        strategy,
        shards,
        tuning or Tuning(),
        strategy=strategy,
        workers=workers,
        shards=shards,
        threads=1,
        device="cpu",
        **options,
    )
    return first  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def single() -> dict[str, Any]:
    found = launched("single", 1)
    assert not [one for one in found.values() if isinstance(one, str)]
    return found


@pytest.mark.parametrize("label", ["zero", "fsdp", "pp", "tp", "ps", "ps-1"])
def test_one_process_or_one_line(label: str, single: dict[str, Any]) -> None:
    strategy = {"zero": "ddp", "ps-1": "ps"}.get(label, label)
    options = {"servers": 2} if label == "ps" else {}
    found = launched(strategy, 2, Tuning(shard_optimizer=label == "zero"), **options)
    wrong = {}
    for name, got in found.items():
        case = CASES[name]
        # A single server updates everything, but only hooks on the server would see it.
        refuses = label in case.by or (label == "ps-1" and case.refused not in ("", ACROSS))
        if case.refused and refuses:
            if not isinstance(got, str) or "\n" in got or not re.search(case.refused, got):
                wrong[name] = got if isinstance(got, str) else "was not refused"
        elif isinstance(got, str):
            wrong[name] = got
        elif not all(_equal(got[key], value, label) for key, value in single[name].items()):
            wrong[name] = "differs"
    assert not wrong


def _equal(got: torch.Tensor, wanted: torch.Tensor, label: str) -> bool:
    # Of tp: sums over at most 8 terms in another order, through a few steps.
    return torch.allclose(got, wanted, rtol=0, atol=1e-5) if label == "tp" else torch.equal(got, wanted)
