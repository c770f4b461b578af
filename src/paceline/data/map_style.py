"""Reading a map-style data set: one with `__getitem__` and `__len__`, in the order that the seed gives."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from itertools import islice, tee
from typing import Any, NamedTuple, Protocol

import numpy as np

from paceline.data.loading import LoadingOptions, LoadingProcesses
from paceline.data.permutation import EpochPermutation, Indices
from paceline.data.reading import Reader
from paceline.data.shards import batch_bounds, shard_bounds, steps_per_epoch
from paceline.data.step_data import ShardData, StepData, split_micro_batches

# The order is computed for about this many samples at once: 4096 take 0.4 ms and 32 take 0.25 ms, so a step
# of 32 samples pays about 3 us for its order, and no step waits for long.
_BLOCK_SAMPLES = 4096


class StepPlan(NamedTuple):
    """The samples of one step: those of each owned shard, whole and in micro-batches."""

    epoch: int
    step: int
    size: int
    owned: range
    samples: list[Indices]
    micro_batches: list[list[Indices]]
    contents: str | None = None
    beginning: str | None = None

    def filled(self, batches: Iterator[Any]) -> StepData:
        """Return the step with the batches that come next, one for each micro-batch."""
        shards = [
            ShardData(shard, samples, list(islice(batches, len(pieces))))
            for shard, samples, pieces in zip(self.owned, self.samples, self.micro_batches, strict=True)
        ]
        return StepData(self.epoch, self.step, self.size, tuple(shards), self.contents, self.beginning)


class Schedule:
    """The samples of the owned shards, step by step; it holds no position of its own."""

    def __init__(
        self,
        order: EpochPermutation,
        *,
        batch_size: int,
        shards: int,
        owned: range,
        micro_batch: int | None = None,
    ) -> None:
        self._order, self._batch_size, self._shards = order, batch_size, shards
        self._micro_batch = micro_batch
        self.owned = owned
        self.steps_per_epoch = steps_per_epoch(order.samples, batch_size)

    def steps(self, epoch: int, start_step: int) -> Iterator[StepPlan]:
        """Yield the steps of an epoch from `start_step` on."""
        for block, size, spans in self._blocks(start_step):
            start, stop = (spans[0][0], spans[-1][1]) if spans else (0, 0)
            width = stop - start
            begins = np.arange(block.start, block.stop, dtype=np.int64) * self._batch_size + start
            positions = begins[:, None] + np.arange(width, dtype=np.int64)
            order = self._order.at(epoch, positions.ravel())
            for row, step in enumerate(block):
                offset = row * width - start
                samples = [order[offset + low : offset + high] for low, high in spans]
                pieces = (
                    [[one] if len(one) else [] for one in samples]
                    if self._micro_batch is None
                    else [split_micro_batches(one, self._micro_batch) for one in samples]
                )
                yield StepPlan(epoch, step, size, self.owned, samples, pieces)

    def _blocks(self, first: int) -> Iterator[tuple[range, int, list[tuple[int, int]]]]:
        """Yield steps of one size, whose order is computed at once, with that size and the bounds of each owned shard."""
        full_steps = self._order.samples // self._batch_size
        while first < self.steps_per_epoch:
            low, high = batch_bounds(first, self._batch_size, self._order.samples)
            spans = [shard_bounds(shard, self._shards, high - low) for shard in self.owned]
            width = spans[-1][1] - spans[0][0] if spans else 0
            last = min(max(full_steps, first + 1), first + max(1, _BLOCK_SAMPLES // max(1, width)))
            yield range(first, last), high - low, spans
            first = last


class Planned(Protocol):
    """Which samples the owned shards hold, step by step."""

    owned: range

    def steps(self, epoch: int, start_step: int) -> Iterator[StepPlan]:
        """Yield the steps of an epoch from `start_step` on."""
        ...


class MapStyle:
    """The steps of the owned shards of a map-style data set, read in this process."""

    def __init__(self, schedule: Planned, reader: Reader) -> None:
        self._schedule, self._reader = schedule, reader

    def steps(self, epoch: int, start_step: int) -> Generator[StepData]:
        """Yield the steps of an epoch from `start_step` on."""
        for plan in self._schedule.steps(epoch, start_step):
            batches = self._reader.read(epoch, [piece for pieces in plan.micro_batches for piece in pieces])
            yield plan.filled(iter(batches))

    def own(self, owned: range) -> None:
        """Carry other shards from the next `steps` on."""
        self._schedule.owned = owned

    def close(self) -> None:
        """Nothing to end."""


class LoadedMapStyle(MapStyle):
    """The steps of the owned shards of a map-style data set, read ahead by other processes."""

    def __init__(self, schedule: Planned, reader: Reader, options: LoadingOptions) -> None:
        super().__init__(schedule, reader)
        self._processes = LoadingProcesses(reader, options)

    def steps(self, epoch: int, start_step: int) -> Generator[StepData]:
        """Yield the steps of an epoch from `start_step` on."""
        plans, ahead = tee(self._schedule.steps(epoch, start_step))
        batches = self._processes.load(
            (epoch, piece) for plan in ahead for pieces in plan.micro_batches for piece in pieces
        )
        for plan in plans:
            yield plan.filled(batches)

    def close(self) -> None:
        """End the loading processes."""
        self._processes.close()
