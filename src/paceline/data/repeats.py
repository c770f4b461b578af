"""Several steps with each global batch: every one of them gets the batch as it was read, whatever the one before did to it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import replace
from typing import Any

from paceline.data.copying import copied
from paceline.data.resident import Rows
from paceline.data.step_data import ShardData, StepData


def repeated(batches: Generator[StepData], times: int, first: int) -> Generator[StepData]:
    """Yield each batch as so many steps; of the first one those from `first` on."""
    with closing(batches):
        for batch in batches:
            data = replace(batch, step=batch.step * times)
            if not data.size:
                yield data
                continue
            for place in range(first, times):
                yield replace(
                    data, step=batch.step * times + place, shards=_given(data, last=place == times - 1)
                )
                # What was noted of a stream is compared, and told, once.
                data = replace(data, contents=None, beginning=None, note=None)
            first = 0


def _given(data: StepData, *, last: bool) -> tuple[ShardData, ...]:
    if last:
        return data.shards
    return tuple(replace(shard, batches=list(map(_apart, shard.batches))) for shard in data.shards)


def _apart(batch: Any) -> Any:
    """Return a batch that shares no memory with this one; what is still to be gathered is gathered anew in each step."""
    return batch if isinstance(batch, Rows) else copied(batch)
