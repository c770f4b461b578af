"""The exchange through shared memory: copy in what others add, add one's own chunk, copy out what others added.

A worker's own chunk never leaves its tensor: 4 bytes move for each byte summed, where a copy of everything in and out
would move 5.5. Additions go piece by piece, so that what was just read or written is still in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.strategies.exchange import Done, Layout
from paceline.world.lane import Lane

PIECE = 1 << 16
"""Elements added at a time: 256 KB of float32, a fraction of a core's own cache."""
ARRIVED, SUMMED = 0, 1
"""The two flags: my parts are in; my chunk is summed."""


@dataclass(frozen=True)
class _Running:
    number: int
    parts: Sequence[Tensor]
    target: Tensor
    slots: list[Tensor]
    bounds: list[tuple[int, int]]
    done: Done


class LaneExchange:
    """Sums among the workers of one host without a socket."""

    def __init__(self, lane: Lane, layout: Layout) -> None:
        self._lane, self._layout = lane, layout
        self._slots: dict[tuple[int, int, torch.dtype], list[Tensor]] = {}
        self._number = 0
        self._running: list[_Running] = []

    def start(self, key: int, parts: Sequence[Tensor], target: Tensor, done: Done) -> None:
        """Copy in the chunks that others will add."""
        layout = self._layout
        slots = self._room(key, target)
        bounds = layout.bounds(target.numel())
        low, high = bounds[layout.rank]
        for slot, part in zip(slots[layout.first[layout.rank] :], parts, strict=False):
            slot[:low].copy_(part[:low])
            slot[high:].copy_(part[high:])
        self._number += 1
        self._lane.post(ARRIVED, self._number)
        self._running.append(_Running(self._number, parts, target, slots, bounds, done))

    def finish(self) -> None:
        """Add up this worker's chunk of each, then collect everybody's."""
        running, self._running = self._running, []
        for one in running:
            self._lane.wait(ARRIVED, one.number)
            self._add(one)
            self._lane.post(SUMMED, one.number)
        layout = self._layout
        for one in running:
            self._lane.wait(SUMMED, one.number)
            for rank, (low, high) in enumerate(one.bounds):
                if rank != layout.rank:
                    one.target[low:high].copy_(one.slots[layout.first[rank]][low:high])
            one.done()

    def _add(self, one: _Running) -> None:
        """Add this worker's chunk in tree order; the total goes to its own slot, for the others, and to its tensor."""
        layout = self._layout
        first = layout.first[layout.rank]
        published, target = one.slots[first], one.target
        rows = list(one.slots)
        rows[first : first + len(one.parts)] = one.parts
        *additions, (into, source) = layout.program
        low, stop = one.bounds[layout.rank]
        while low < stop:
            high = min(low + PIECE, stop)
            for a, b in additions:
                rows[a][low:high].add_(rows[b][low:high])
            total = published[low:high]
            torch.add(rows[into][low:high], rows[source][low:high], out=total)
            target[low:high].copy_(total)
            low = high

    def _room(self, key: int, like: Tensor) -> list[Tensor]:
        """Give the slots for one tensor, one for each subtree of all workers; the same ones every step."""
        name = (key, like.numel(), like.dtype)
        if name not in self._slots:
            length = like.numel() * like.element_size()
            self._slots[name] = [
                self._lane.tensor(self._lane.reserve(length), like.numel(), like.dtype)
                for _ in range(sum(self._layout.counts))
            ]
        return self._slots[name]
