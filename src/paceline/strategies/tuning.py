"""What a strategy may be tuned by: memory, communication, schedules. Checked when made. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

from paceline.errors import InputError
from paceline.option_fields import SPEED, Options, option, shown
from paceline.ranges import COUNT, COUNT_OR_NONE, WORKERS, Range

RECOMPUTE = ("none", "blocks", "selective")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
GATHERS = ("fp32", "bf16", "fp16")
OUTERS = ("average", "nesterov")
_OF_DDP, _OF_FSDP, _OF_PP, _OF_TP, _OF_LOCAL = (
    f"Strategy {name}" for name in ("ddp", "fsdp", "pp", "tp", "local-sgd")
)
_BUCKETS, _GATHERED = (("ddp", "ddp"), ("tp", "ddp")), (("fsdp", "fsdp"), ("tp", "fsdp"))
"""Users of options that a side of the mesh has wherever it stands, beside tp too."""
_LOCAL = (("local-sgd", "ddp"),)


@dataclass(frozen=True, kw_only=True)
class Tuning(Options):
    """Options of single strategies; the defaults change nothing."""

    activation_checkpointing: str = option(
        "none",
        "Compute activations again in the backward pass: none, blocks, or selective (keeps the outputs of matrix products).",
        SPEED,
        names=RECOMPUTE,
    )
    activation_checkpointing_every: int = option(1, "Checkpoint every N-th block.", SPEED, COUNT)
    shard_optimizer: bool = option(
        False,
        "Each worker keeps the optimizer state of its part of the parameters (ZeRO-1).",
        _OF_DDP,
        users=(("ddp", "ddp"),),
    )
    compress: str = option(
        "none",
        "Send gradients as bf16, fp16 (numeric) or powersgd:RANK (statistical).",
        _OF_DDP,
        users=_BUCKETS,
    )
    bucket_mb: float | None = option(
        None,
        "Megabytes of gradients that are summed at once.",
        _OF_DDP,
        Range(0, 10**6, whole=False, above=True),
        shown="what the exchange does best",
        users=_BUCKETS,
    )
    reshard: bool = option(
        True,
        "Release gathered weights after the forward pass.",
        _OF_FSDP,
        users=_GATHERED,
    )
    fsdp_dtype: str = option(
        "fp32",
        "The type in which weights are gathered and computed with: fp32, bf16 or fp16 (level numeric).",
        _OF_FSDP,
        names=GATHERS,
        users=_GATHERED,
    )
    offload: bool = option(
        False,
        "Weights and optimizer state live in host memory.",
        _OF_FSDP,
        users=(("fsdp", "fsdp"),),
    )
    schedule: str = option(
        "1f1b",
        "gpipe, 1f1b, interleaved or zero-bubble.",
        _OF_PP,
        names=SCHEDULES,
        users=(("pp", "pp"),),
    )
    stages_per_worker: int | None = option(
        None,
        "Stages that each worker holds.",
        _OF_PP,
        WORKERS,
        shown="what the schedule needs",
        users=(("pp", "pp"),),
    )
    sequence_parallel: bool = option(
        False,
        "Norms and dropouts between split layers work on a part of the sequence each.",
        _OF_TP,
        users=(("tp", "tp"),),
    )
    loss_parallel: bool = option(
        False,
        "Scores stay split when the loss is computed.",
        _OF_TP,
        users=(("tp", "tp"),),
    )
    local_steps: int = option(
        8,
        "Steps between two averages.",
        _OF_LOCAL,
        COUNT,
        users=_LOCAL,
    )
    local_warmup: int = option(
        0,
        "First steps that are taken together.",
        _OF_LOCAL,
        COUNT_OR_NONE,
        users=_LOCAL,
    )
    outer_optimizer: str = option(
        "average",
        "What is done with the averaged change: average, or nesterov (DiLoCo).",
        _OF_LOCAL,
        names=OUTERS,
        users=_LOCAL,
    )
    outer_lr: float = option(
        0.7,
        "Learning rate of nesterov.",
        _OF_LOCAL,
        Range(0, 10**6, whole=False, above=True),
        users=_LOCAL,
    )
    outer_momentum: float = option(
        0.9,
        "Momentum of nesterov.",
        _OF_LOCAL,
        Range(0, 1, whole=False, below=True),
        users=_LOCAL,
    )
    staleness: int = option(
        0,
        "Steps that a worker may be ahead of the slowest; 0 is synchronous.",
        "Strategy ps",
        COUNT_OR_NONE,
        users=(("ps", "ddp"),),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if re.fullmatch(r"none|bf16|fp16|powersgd:[1-9][0-9]{0,5}", self.compress) is None:
            raise InputError(
                f"--compress {self.compress!r} is none of bf16, fp16, powersgd:RANK (powersgd:2, say)."
            )


USERS = {one.name: about.users for one in fields(Tuning) if (about := shown(one)) and about.users}
"""By option the strategies that it means something to, each with the side of the mesh it tunes; what is not here serves all."""


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
    for asked in changes(given):
        if strategies and not any(serves(asked, name, sides) for name, sides in strategies.values()):
            owners = " or ".join(
                name if name in (side, "local-sgd", "ps") else f"{name} beside {side}"
                for name, side in USERS[asked]
            )
            raise InputError(
                f"--{asked.replace('_', '-')} is an option of {owners}, and --strategy {','.join(strategies)} has no use for "
                f"it. Use --strategy {USERS[asked][0][0]}, or leave it out."
            )
