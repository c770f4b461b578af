"""Optimizers that look further than what one worker updates: one process's bits, or one line, on every strategy."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

import paceline
from paceline.errors import InputError
from paceline.strategies.tuning import Tuning
from paceline.world import determinism
from paceline.world.interruption import InterruptedWaitError
from tests.dist.strategies import own_optimizers as own
from tests.dist.strategies.ordinary import Made
from tests.dist.strategies.side_by_side import Interrupted, launched, prepared, steps_of

SHARDS = 4
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
    case = CASES[name]
    task = Made(optimizer=case.optimizer)
    try:
        with prepared(run, name, task, strategy, shards, tuning, _slower) as (replica, loader, _):
            for work in steps_of(loader):
                case.meddle(work.number, replica.model, replica.optimizer)
                replica.step(work, task.loss, None)
            return {key: value.clone() for key, value in replica.state()["model"].items()}
    except InputError as error:
        return str(error)
    except InterruptedWaitError as error:
        return Interrupted(error)
    finally:
        for hook in own.GLOBAL:
            hook.remove()
        own.GLOBAL.clear()


def _slower(optimizer: Optimizer) -> Any:
    """Wrap the optimizer's step, as every schedule of torch does."""
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)


@pytest.fixture(scope="module")
def single() -> dict[str, Any]:
    found = launched(train, "single", 1, SHARDS)
    assert not [one for one in found.values() if isinstance(one, str)]
    return found


@pytest.mark.parametrize("label", ["zero", "fsdp", "pp", "tp", "ps", "ps-1"])
def test_one_process_or_one_line(label: str, single: dict[str, Any]) -> None:
    strategy = {"zero": "ddp", "ps-1": "ps"}.get(label, label)
    options = {"servers": 2} if label == "ps" else {}
    found = launched(train, strategy, 2, SHARDS, Tuning(shard_optimizer=label == "zero"), **options)
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
