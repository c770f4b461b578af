"""The exchange through shared memory: copy in what others add, add one's own chunk, copy out what others added.

A worker's own chunk never leaves its tensor: 4 bytes move for each byte summed, where a copy of everything in and out
would move 5.5. Additions go piece by piece, so that what was just read or written is still in the cache. Of a small tensor
each worker adds up all of it: the same additions, and nobody waits for the others a second time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.reduce.exchange import Done, Layout
from paceline.world.shared_memory import LINE, SharedMemoryChannel

PIECE = 1 << 16
"""Elements added at a time: 256 KB of float32, a fraction of a core's own cache."""
SMALL = 1 << 14
"""Bytes up to which adding up everything takes less than waiting for others who add up a chunk."""
ARRIVED, SUMMED = 0, 1
"""The two flags: my parts are in; my chunk is summed."""
ROOM = 1 << 25
"""Bytes for each worker's part of what is in flight: eight buckets."""
Pairs = list[tuple[Tensor, Tensor]]
_Key = tuple[int, int]
"""The name of a tensor, and where in it."""
_Place = tuple[int, int, torch.dtype]
"""Address, length and type of a tensor."""
_Form = tuple[Any, ...]
"""The places of what is sent and of the total, and that in the room."""


@dataclass(frozen=True)
class _Plan:
    """Every copy and addition of one exchange, on views made beforehand; a tensor that comes back every step is
    planned once, since cutting views costs more than a small exchange itself."""

    copy_in: Pairs
    sums: list[tuple[Tensor, Tensor, Tensor, Tensor | None]]
    """The additions in order: left, right, where the sum goes, and where else a total goes."""
    copy_out: Pairs
    chunked: bool
    """Whether each worker adds up a chunk, and collects the others' from them."""


class SharedMemoryExchange:
    """Sums among the workers of one host without a socket.

    All exchanges that are in flight lie side by side in a room of fixed size. When it is full they are finished, so what
    is shared does not grow with the model.
    """

    def __init__(self, channel: SharedMemoryChannel, layout: Layout) -> None:
        self._channel, self._layout = channel, layout
        self._room = [channel.reserve(ROOM) for _ in range(sum(layout.counts))]
        self._taken = 0
        self._slots: dict[tuple[int, int, torch.dtype], list[Tensor]] = {}
        self._forms: dict[_Key, _Form] = {}
        self._plans: dict[_Key, _Plan] = {}
        self._number = 0
        self._copied = 0
        """The number that says that all exchanges before it were copied out."""
        self._running: list[tuple[int, _Plan, Done]] = []

    def start(self, key: int, parts: Sequence[Tensor], target: Tensor, done: Done, *, low: int = 0) -> None:
        """Copy in the chunks that others will add; what is larger than the room goes through it in turns.

        `low` is where in its tensor a turn begins.
        """
        length = -(-target.numel() * target.element_size() // LINE) * LINE
        if target.numel() * target.element_size() > ROOM:
            self._start_in_turns(key, parts, target, done)
            return
        if self._taken + length > ROOM:
            self.finish()
        if not self._taken:
            self._channel.wait(SUMMED, self._copied)
        name, form = (key, low), (*_place(parts[0]), *_place(target), self._taken)
        returns = len(parts) == 1 and self._forms.get(name) == form
        plan = self._plans.get(name) if returns else None
        if plan is None:
            plan = self._make_plan(self._placed(target), parts, target)
            # Kept only for what has come back once: torch lays its buckets out anew after the first step, and a plan
            # would hold the old ones.
            if returns:
                self._plans[name] = plan
            else:
                self._forms[name] = form
                self._plans.pop(name, None)
        self._taken += length
        for into, source in plan.copy_in:
            into.copy_(source)
        self._number += 1
        self._channel.post(ARRIVED, self._number)
        self._running.append((self._number, plan, done))

    def _start_in_turns(self, key: int, parts: Sequence[Tensor], target: Tensor, done: Done) -> None:
        count, most = target.numel(), ROOM // target.element_size()
        for low in range(0, count, most):
            cut = target[low : low + most]
            pieces = [cut if part is target else part[low : low + most] for part in parts]
            self.start(key, pieces, cut, done if low + most >= count else lambda: None, low=low)

    def finish(self) -> None:
        """Add up this worker's chunk of each in tree order, for the others and for itself, then collect everybody's."""
        running, self._running = self._running, []
        for number, plan, _ in running:
            self._channel.wait(ARRIVED, number)
            for left, right, into, mine in plan.sums:
                torch.add(left, right, out=into)
                if mine is not None:
                    mine.copy_(into)
            if plan.chunked:
                self._channel.post(SUMMED, number)
        for number, plan, done in running:
            if plan.chunked:
                self._channel.wait(SUMMED, number)
                for into, source in plan.copy_out:
                    into.copy_(source)
            done()
        if running:
            self._taken = 0
            self._number += 1
            self._copied = self._number
            self._channel.post(SUMMED, self._copied)

    def _placed(self, like: Tensor) -> list[Tensor]:
        """Return the slots of the next exchange, one for each subtree of all workers."""
        return [self._channel.tensor(room + self._taken, like.numel(), like.dtype) for room in self._room]

    def _make_plan(self, slots: list[Tensor], parts: Sequence[Tensor], target: Tensor) -> _Plan:
        first = self._layout.first[self._layout.rank]
        rows = list(slots)
        rows[first : first + len(parts)] = parts
        if target.nbytes <= SMALL:
            return self._plan_whole(slots[first:], rows, parts, target)
        return self._plan_chunked(slots, rows, parts, target)

    def _plan_whole(
        self, mine: list[Tensor], rows: list[Tensor], parts: Sequence[Tensor], target: Tensor
    ) -> _Plan:
        """Add up all of a tensor, in memory of this worker's own: the others read what was copied in."""
        *additions, (left, right) = self._layout.program
        sums: list[tuple[Tensor, Tensor, Tensor, Tensor | None]] = []
        for a, b in additions:
            sums.append((rows[a], rows[b], torch.empty_like(target), None))
            rows[a] = sums[-1][2]
        sums.append((rows[left], rows[right], target, None))
        return _Plan(_filled(list(zip(mine, parts, strict=False))), sums, [], chunked=False)

    def _plan_chunked(
        self, slots: list[Tensor], rows: list[Tensor], parts: Sequence[Tensor], target: Tensor
    ) -> _Plan:
        layout = self._layout
        bounds = layout.bounds(target.numel())
        first = layout.first[layout.rank]
        start, stop = bounds[layout.rank]
        copy_in: Pairs = []
        for slot, part in zip(slots[first:], parts, strict=False):
            copy_in += [(slot[:start], part[:start]), (slot[stop:], part[stop:])]
        *additions, (left, right) = layout.program
        sums: list[tuple[Tensor, Tensor, Tensor, Tensor | None]] = []
        for low in range(start, stop, PIECE):
            cut = slice(low, min(low + PIECE, stop))
            sums += [(rows[a][cut], rows[b][cut], rows[a][cut], None) for a, b in additions]
            sums.append((rows[left][cut], rows[right][cut], slots[first][cut], target[cut]))
        copy_out = [
            (target[low:high], slots[layout.first[rank]][low:high])
            for rank, (low, high) in enumerate(bounds)
            if rank != layout.rank
        ]
        return _Plan(_filled(copy_in), sums, _filled(copy_out), chunked=True)

    def room(self, key: int, like: Tensor) -> list[Tensor]:
        """Return slots that are one tensor's alone, one for each subtree of all workers; the same ones every step."""
        name = (key, like.numel(), like.dtype)
        if name not in self._slots:
            length = like.numel() * like.element_size()
            self._slots[name] = [
                self._channel.tensor(self._channel.reserve(length), like.numel(), like.dtype)
                for _ in range(sum(self._layout.counts))
            ]
        return self._slots[name]


def _place(tensor: Tensor) -> _Place:
    return tensor.data_ptr(), tensor.numel(), tensor.dtype


def _filled(pairs: Pairs) -> Pairs:
    return [(into, source) for into, source in pairs if source.numel()]
