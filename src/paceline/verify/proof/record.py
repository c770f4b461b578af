"""What a watched run is asked for, and what it leaves: a digest of every tensor at every step. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

Digests = dict[str, str]
"""Digest by name."""
Key = TypeVar("Key")


def first_other(mine: Mapping[Key, Any], theirs: Mapping[Key, Any]) -> Key | None:
    """Return the first key that has another value in two mappings, or is in one of them only; None where there is none."""
    return next((key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)), None)


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


@dataclass(kw_only=True)
class TorchCall:
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
    start: Digests
    """The model as the first step found it."""
    steps: list[StepRecord]
    modules: list[str] = field(default_factory=list)
    """Modules in the order in which the first forward pass came to them; only where that was asked for."""
    metrics: dict[str, float] = field(default_factory=dict)
    """What an evaluation after the last step came to."""
    trace: list[TorchCall] = field(default_factory=list)
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


@dataclass(frozen=True, kw_only=True)
class Watching:
    """What else is wanted of a watched run, beside its record."""

    epochs: int | None = None
    """What a schedule is laid out for."""
    until: int | None = None
    """End after this step; the schedule is laid out as for the whole."""
    dump: Dump | None = None
    order: bool = False
    """Whether to note in which order the modules run."""
    evaluate: bool = False
    trace: int | None = None
    """The step whose every operation is to be written down."""
