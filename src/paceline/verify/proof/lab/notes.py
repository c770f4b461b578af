"""What one worker noted down in the laboratory. Plain data, so that it travels."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.verify.proof.record import Digests


@dataclass(frozen=True, kw_only=True)
class ShardAttempt:
    """One shard computed once, forward and backward, from the same weights, buffers and seeds."""

    totals: tuple[str, ...]
    weights: tuple[float, ...]
    modules: tuple[tuple[str, str], ...]
    """Each module's output as a digest, in the order of execution."""
    gradients: Digests
    unused: tuple[str, ...]
    """Parameters that got no gradient."""
    buffers: Digests
    """Buffers that the forward pass changed."""
    hidden: tuple[str, ...]
    """Attributes of modules that the forward pass changed and that are no buffers."""
    seed_left: int
    """What torch's generator had been seeded with when the loss was done."""
    rates_moved: tuple[float, float] | None
    """A learning rate before and after, where the loss function changed one."""

    def same_answer(self, other: ShardAttempt) -> bool:
        """Return whether another attempt came to the same loss and gradients, to the bit."""
        return self.totals == other.totals and self.gradients == other.gradients

    def first_module(self, other: ShardAttempt) -> str | None:
        """Return the first module whose output differs in another attempt; None where no module's does."""
        pairs = zip(self.modules, other.modules, strict=False)
        return next((mine[0] or "(the model itself)" for mine, theirs in pairs if mine != theirs), None)


@dataclass(frozen=True, kw_only=True)
class SplitLosses:
    """The loss of three samples in one batch, and of the same samples in batches of one and two."""

    whole_total: float
    whole_weight: float
    parts_total: float
    parts_weight: float


@dataclass(frozen=True, kw_only=True)
class Notes:
    """Everything one worker saw."""

    rank: int
    samples: int | None
    made: Digests
    data: dict[int, str]
    """Digest of the first step's batches by shard, read once and read again."""
    data_again: dict[int, str]
    step_data: dict[int, str]
    """Digest of the batches that the attempts were made with."""
    attempts: dict[int, ShardAttempt]
    repeated: dict[int, ShardAttempt]
    bent: tuple[str, ...]
    """Parameters whose gradient is no multiple of the backward pass's start: something in it is not linear."""
    touched: tuple[str, ...]
    """Parameters whose gradient the loss function itself changed."""
    parts: SplitLosses | None
    no_kernel: str | None
    """The operation that torch has no deterministic kernel for."""
    unchecked: tuple[str, ...] = field(default=())
    """Experiments that could not be made, and why."""
