"""What a strategy may be tuned by: memory, communication, schedules. Checked when made. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

from paceline.errors import InputError, UnknownNameError
from paceline.ranges import COUNT, COUNT_OR_NONE, WORKERS, Options, Range, ranged

RECOMPUTE = ("none", "blocks", "selective")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
GATHERS = ("fp32", "bf16", "fp16")
OUTERS = ("average", "nesterov")
_DDP, _FSDP = (("ddp", "ddp"), ("tp", "ddp")), (("fsdp", "fsdp"), ("tp", "fsdp"))
USERS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "shard_optimizer": (("ddp", "ddp"),),
    "compress": _DDP,
    "bucket_mb": _DDP,
    "offload": (("fsdp", "fsdp"),),
    "reshard": _FSDP,
    "gather": _FSDP,
    "schedule": (("pp", "pp"),),
    "stages_a_worker": (("pp", "pp"),),
    "sequence_parallel": (("tp", "tp"),),
    "loss_parallel": (("tp", "tp"),),
    "local_steps": (("local-sgd", "ddp"),),
    "local_warmup": (("local-sgd", "ddp"),),
    "outer": (("local-sgd", "ddp"),),
    "outer_lr": (("local-sgd", "ddp"),),
    "outer_momentum": (("local-sgd", "ddp"),),
    "staleness": (("ps", "ddp"),),
}
"""The strategies that an option means something to, each with the side of the mesh it tunes; what is not here serves all."""


@dataclass(frozen=True, kw_only=True)
class Tuning(Options):
    """Options of single strategies; the defaults change nothing."""

    recompute: str = "none"
    """Which activations are computed again in the backward pass: none, those of the repeated blocks, or all but products."""
    recompute_every: int = ranged(1, COUNT)
    """Of how many blocks one is recomputed."""
    shard_optimizer: bool = False
    """ddp: each worker keeps and updates the optimizer state of its part of the parameters."""
    offload: bool = False
    """fsdp: shards live in host memory and come to the accelerator when they are needed."""
    reshard: bool = True
    """fsdp: whether gathered weights are let go of after the forward pass."""
    gather: str = "fp32"
    """fsdp: the type in which weights are gathered and computed with; below fp32 the level is numeric."""
    compress: str = "none"
    """ddp: how gradients are made smaller on their way: none, bf16, fp16, powersgd:RANK."""
    bucket_mb: float | None = ranged(None, Range(0, 10**6, whole=False, above=True))
    """ddp: how much is summed at once; None leaves it to the exchange."""
    schedule: str = "1f1b"
    """pp: in which order micro-batches go forward and backward."""
    stages_a_worker: int | None = ranged(None, WORKERS)
    """pp: how many stages each worker holds; None is what the schedule needs."""
    sequence_parallel: bool = False
    """tp: whether norms and dropouts between split layers work on a part of the sequence each."""
    loss_parallel: bool = False
    """tp: whether the last layer's scores stay split when the loss is computed."""
    local_steps: int = ranged(8, COUNT)
    """local-sgd: steps between two averages."""
    local_warmup: int = ranged(0, COUNT_OR_NONE)
    """local-sgd: how many first steps are taken together."""
    outer: str = "average"
    """local-sgd: what is done with the averaged change: taken as it is, or through a Nesterov momentum."""
    outer_lr: float = ranged(0.7, Range(0, 10**6, whole=False, above=True))
    outer_momentum: float = ranged(0.9, Range(0, 1, whole=False, below=True))
    staleness: int = ranged(0, COUNT_OR_NONE)
    """ps: how many steps a worker may be ahead of the slowest; 0 takes all steps together."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for kind, value, known in (
            ("recompute", self.recompute, RECOMPUTE),
            ("schedule", self.schedule, SCHEDULES),
            ("gather", self.gather, GATHERS),
            ("outer optimizer", self.outer, OUTERS),
        ):
            if value not in known:
                raise UnknownNameError(kind, value, known)
        if re.fullmatch(r"none|bf16|fp16|powersgd:[1-9][0-9]{0,5}", self.compress) is None:
            raise InputError(
                f"--compress {self.compress} is none of bf16, fp16, powersgd:RANK (powersgd:2, say)."
            )


def serves(option: str, strategy: str, sides: Collection[str]) -> bool:
    """Return whether an option means something to a strategy on a mesh of these sides."""
    users = USERS.get(option)
    return users is None or any(strategy == name and side in sides for name, side in users)


def changes(given: Mapping[str, Any]) -> list[str]:
    """Return the options that ask for something: a switch that is put where it is anyway asks for nothing."""
    defaults = {one.name: one.default for one in fields(Tuning)}
    return [
        name for name, value in given.items() if not (isinstance(value, bool) and value == defaults[name])
    ]


def check_use(given: Mapping[str, Any], strategies: Mapping[str, tuple[str, Collection[str]]]) -> None:
    """Refuse an option that means nothing to any of some strategies, each by its text with its name and its sides."""
    for option in changes(given):
        if strategies and not any(serves(option, name, sides) for name, sides in strategies.values()):
            owners = " or ".join(
                name if name in (side, "local-sgd", "ps") else f"{name} beside {side}"
                for name, side in USERS[option]
            )
            raise InputError(
                f"--{option.replace('_', '-')} is an option of {owners}, and --strategy {','.join(strategies)} has no use for "
                f"it. Use --strategy {USERS[option][0][0]}, or leave it out."
            )
