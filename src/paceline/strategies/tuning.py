"""What a strategy may be tuned by: memory, communication, schedules. Checked when made. Imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

from paceline.errors import InputError, UnknownNameError

RECOMPUTE = ("none", "blocks", "selective")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
GATHERS = ("fp32", "bf16", "fp16")
OUTERS = ("average", "nesterov")


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Options of single strategies; the defaults change nothing."""

    recompute: str = "none"
    """Which activations are computed again in the backward pass: none, those of the repeated blocks, or all but products."""
    recompute_every: int = 1
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
    bucket_mb: float | None = None
    """ddp: how much is summed at once; None leaves it to the exchange."""
    schedule: str = "1f1b"
    """pp: in which order micro-batches go forward and backward."""
    stages_a_worker: int | None = None
    """pp: how many stages each worker holds; None is what the schedule needs."""
    sequence_parallel: bool = False
    """tp: whether norms and dropouts between split layers work on a part of the sequence each."""
    loss_parallel: bool = False
    """tp: whether the last layer's scores stay split when the loss is computed."""
    local_steps: int = 8
    """local-sgd: steps between two averages."""
    local_warmup: int = 0
    """local-sgd: how many first steps are taken together."""
    outer: str = "average"
    """local-sgd: what is done with the averaged change: taken as it is, or through a Nesterov momentum."""
    outer_lr: float = 0.7
    outer_momentum: float = 0.9

    def __post_init__(self) -> None:
        for kind, value, known in (
            ("recompute", self.recompute, RECOMPUTE),
            ("schedule", self.schedule, SCHEDULES),
            ("gather", self.gather, GATHERS),
            ("outer optimizer", self.outer, OUTERS),
        ):
            if value not in known:
                raise UnknownNameError(kind, value, known)
        if re.fullmatch(r"none|bf16|fp16|powersgd:[1-9]\d*", self.compress) is None:
            raise InputError(
                f"--compress {self.compress} is none of bf16, fp16, powersgd:RANK (powersgd:2, say)."
            )
        for name in ("recompute_every", "local_steps", "bucket_mb", "stages_a_worker", "outer_lr"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InputError(f"--{name.replace('_', '-')} is {value}, but must be above 0.")
        if self.local_warmup < 0:
            raise InputError(f"--local-warmup is {self.local_warmup}, but must be 0 or more.")
        if not 0 <= self.outer_momentum < 1:
            raise InputError(
                f"--outer-momentum is {self.outer_momentum}, but must be at least 0 and less than 1."
            )
