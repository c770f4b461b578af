"""The exchange without the final gather, in memory that the workers of one host share.

Every worker lays its sums out where all can read them; each adds up its own part straight from there, in tree order, a
piece at a time so that what was just added is still in the cache. There is room for two exchanges: one is filled while the
other is added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from paceline.reduce.exchange import Layout
from paceline.reduce.gather import reach_channel
from paceline.reduce.scatter import Scatter
from paceline.reduce.shared_memory import ARRIVED, PIECE, SUMMED
from paceline.world import World
from paceline.world.shared_memory import SharedMemoryChannel

PLACES = 2
SMALLEST = 1 << 16
"""Bytes that small sums fit into: those of thousands of auxiliary terms."""


class SharedMemoryScatter:
    """Sums of all workers that data is dealt to, each worker's part to itself."""

    def __init__(self, channel: SharedMemoryChannel, layout: Layout, parts: int) -> None:
        """`parts` are those that a model is cut into; copies of it stand beside each other in the order of ranks."""
        self._channel, self._layout = channel, layout
        self._tensor = cache(channel.tensor)  # the same few pieces of memory in every step
        self._part = layout.rank % parts
        self._rooms: list[list[int]] = []
        self._number = 0
        self._pending: tuple[list[Tensor], Tensor, int] | None = None

    def reserve(self, length: int) -> None:
        """Set memory aside for the largest sum, of so many bytes."""
        length = max(length, SMALLEST)
        self._rooms = [
            [self._channel.reserve(length) for _ in range(sum(self._layout.counts))] for _ in range(PLACES)
        ]

    def room(self, place: int, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:  # noqa: ARG002
        """Return memory for the next sums, the one at `place` among this worker's, once everybody has read what was there."""
        number = self._number + 1
        self._channel.wait(SUMMED, max(number - PLACES, 0))
        rooms = self._rooms[number % PLACES]
        return self._tensor(rooms[self._layout.first[self._layout.rank] + place], count, dtype)

    def start(self, sums: Sequence[Tensor], target: Tensor) -> None:
        """Show this worker's sums; each is a whole tensor, cut into equal parts in the order of `fsdp` places.

        `target` gets this worker's part of the total: when the next one starts, or at `finish`.
        """
        self._show(sums, target, self._part * target.numel())

    def finish(self) -> None:
        """Add up this worker's part of what was started."""
        if self._pending is None:
            return
        (rows, target, start), self._pending = self._pending, None
        self._channel.wait(ARRIVED, self._number)
        self._add(rows, target, start)
        self._channel.post(SUMMED, self._number)

    def add_small(self, sums: Sequence[Tensor]) -> Tensor:
        """Return the whole of a small sum on every worker; `sums` are this worker's, from left to right."""
        total = torch.empty_like(sums[0])
        self._show(sums, total, 0)
        self.finish()
        return total

    def _show(self, sums: Sequence[Tensor], target: Tensor, start: int) -> None:
        if self._pending is not None:
            self.finish()
        for place, one in enumerate(sums):
            room = self.room(place, one.numel(), one.dtype, one.device)
            if one.data_ptr() != room.data_ptr():
                room.copy_(one)
        self._number += 1
        self._channel.post(ARRIVED, self._number)
        whole = sums[0].numel()
        rows = [self._tensor(room, whole, target.dtype) for room in self._rooms[self._number % PLACES]]
        self._pending = (rows, target, start)

    def _add(self, rows: list[Tensor], target: Tensor, start: int) -> None:
        program, left = self._layout.program, self._layout.left[0]
        # Others may read the same part, for a copy of the model beside this one: sums on the way stay here.
        between = {into: target.new_empty(PIECE) for into, _ in program[:-1]}
        for low in range(0, target.numel(), PIECE):
            total = target[low : low + PIECE]
            cut = slice(start + low, start + low + total.numel())
            pieces = [row[cut] for row in rows]
            for into, source in program[:-1]:
                pieces[into] = torch.add(pieces[into], pieces[source], out=between[into][: total.numel()])
            if program:
                into, source = program[-1]
                torch.add(pieces[into], pieces[source], out=total)
            else:
                total.copy_(pieces[left])


def open_scatter(data: World, copies: World, shards: int, transport: str) -> Scatter | SharedMemoryScatter:
    """Choose how sums travel among all workers that data is dealt to; all of them choose alike."""
    shared = reach_channel(data, transport)
    if shared is None:
        return Scatter(data, copies, shards)
    return SharedMemoryScatter(shared, Layout.of_workers(data, shards), data.size // copies.size)
