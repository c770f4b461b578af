"""Which samples a worker reads at each step of an epoch of a map-style data set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from paceline.data.permutation import EpochPermutation, Indices
from paceline.data.shards import batch_bounds, shard_bounds, steps_per_epoch

# The order is computed for about this many samples at once: 4096 take 0.4 ms and 32 take 0.25 ms, so a step
# of 32 samples pays about 3 us for its order, and no step waits for long.
_BLOCK_SAMPLES = 4096


class StepPlan(NamedTuple):
    """The samples of one step: `parts` holds those of each owned shard."""

    step: int
    size: int
    parts: list[Indices]


class Schedule:
    """The samples of the owned shards, step by step; it holds no position of its own."""

    def __init__(self, order: EpochPermutation, *, batch_size: int, shards: int, owned: range) -> None:
        self._order, self._batch_size, self._shards = order, batch_size, shards
        self.owned = owned
        self.steps_per_epoch = steps_per_epoch(order.samples, batch_size)

    def steps(self, epoch: int, start_step: int) -> Iterator[StepPlan]:
        """Go through an epoch from a step on."""
        full_steps = self._order.samples // self._batch_size
        first = start_step
        while first < self.steps_per_epoch:
            low, high = batch_bounds(first, self._batch_size, self._order.samples)
            spans = [shard_bounds(shard, self._shards, high - low) for shard in self.owned]
            width = spans[-1][1] - spans[0][0] if spans else 0
            last = min(max(full_steps, first + 1), first + max(1, _BLOCK_SAMPLES // max(1, width)))
            yield from self._block(epoch, first, last, high - low, spans)
            first = last

    def _block(
        self, epoch: int, first: int, last: int, size: int, spans: Sequence[tuple[int, int]]
    ) -> Iterator[StepPlan]:
        """Go through steps of one size, their order computed at once."""
        start, stop = (spans[0][0], spans[-1][1]) if spans else (0, 0)
        width = stop - start
        begins = np.arange(first, last, dtype=np.int64) * self._batch_size + start
        positions = begins[:, None] + np.arange(width, dtype=np.int64)
        samples = self._order.at(epoch, positions.ravel())
        for row, step in enumerate(range(first, last)):
            offset = row * width - start
            yield StepPlan(step, size, [samples[offset + low : offset + high] for low, high in spans])
