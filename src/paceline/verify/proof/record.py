"""What a run leaves for the comparison: a digest of every tensor at every step, and where each came from. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

Digests = dict[str, str]
"""Digest by name."""


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One worker's view of one step."""

    number: int
    epoch: int
    samples: dict[int, tuple[int, ...]]
    """Sample ids, by shard."""
    data: dict[int, str]
    """Digest of the batches of each shard, before the loss saw them."""
    changed: tuple[int, ...]
    """Shards whose batches were changed in place by the loss."""
    shard_losses: dict[int, tuple[str, ...]]
    """The loss of each batch of a shard, to the bit."""
    loss: float
    rates: tuple[float, ...]
    """The learning rates that the update was made with."""
    rates_moved: bool
    """Whether the loss function changed a learning rate."""
    gradients: Digests
    """Combined, normalised and clipped: as the optimizer takes them."""
    weights: Digests
    optimizer: Digests
    buffers: Digests
    """As a checkpoint of this step would hold them."""
    own_buffers: Digests
    """As this worker had them before anybody made them agree."""


@dataclass(kw_only=True)
class Call:
    """One call of a function of torch, in the computation of one batch's loss."""

    shard: int
    batch: int
    module: str
    """The innermost module it was made in; empty outside of all."""
    function: str
    inputs: tuple[str, ...]
    """A digest of each tensor, and every other argument as it reads."""
    output: str
    gradient: str = ""
    """Digest of the gradient that the backward pass brought to its output."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One worker's whole run."""

    rank: int
    exactness: str
    precision: str
    samples: int | None
    """Samples of the training set, as this worker sees it."""
    made: Digests
    """The model as the task made it."""
    start: Digests
    """The model as the first step found it."""
    steps: list[StepRecord]
    modules: list[str] = field(default_factory=list)
    """Modules in the order in which the first forward pass came to them; only where that was asked for."""
    metrics: dict[str, float] = field(default_factory=dict)
    """What an evaluation after the last step came to."""
    trace: list[Call] = field(default_factory=list)
    """What torch was asked to compute for the loss of one step; only where that was asked for."""
    unchecked: tuple[str, ...] = ()
    """What this run could not be held to, and why."""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Dump:
    """Which steps' tensors are to be written down, and where."""

    folder: Path
    steps: tuple[int, ...]

    def path(self, rank: int, step: int) -> Path:
        """Return the file of one step of one worker."""
        return self.folder / f"rank-{rank}-step-{step}.pt"
