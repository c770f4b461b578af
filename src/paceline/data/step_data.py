"""What a ShardedLoader yields for one step: the global batch's size, and this worker's shards of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.data.permutation import Indices


@dataclass(frozen=True, slots=True)
class ShardData:
    """One shard of a global batch; `batches` is empty where a short last batch left the shard empty."""

    index: int
    samples: Indices
    """The ids of the samples in the whole data set, in order; in an order of the run's own, as in a stream, their positions."""
    batches: list[Any]
    """The collated micro-batches."""


@dataclass(frozen=True, slots=True)
class StepData:
    """This worker's share of one global batch."""

    epoch: int
    step: int
    """Counted within the epoch."""
    size: int
    """Samples of the GLOBAL batch; 0 where a stream has ended before the step that it is read from."""
    shards: tuple[ShardData, ...]
    """The shards this worker carries, empty ones included."""
    contents: str | None = None
    """What items of a stream's global batch hold, where that was asked for and is looked at; or the run's own order."""
    beginning: str | None = None
    """What items of a stream's first global batch in this epoch hold, empty where nothing of them can be compared;
    or the run's own order.

    It is said in the first step of a reading, where that batch was read and has more than one item.
    """
    state: Any = None
    """The state of a stream behind this step, where it has one that was seen to bring it back."""
    note: str | None = None
    """What the user is to know of the stream."""


def split_micro_batches(samples: Indices, micro_batch: int | None) -> list[Indices]:
    """Cut a shard into consecutive micro-batches; an empty shard gives none."""
    length = len(samples)
    if micro_batch is None or length <= micro_batch:
        return [samples] if length else []
    return [samples[start : start + micro_batch] for start in range(0, length, micro_batch)]
