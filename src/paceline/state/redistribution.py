"""Brings to each worker of a new group the chunks of a sharded state that it lacks; what it holds already stays where it is.

Every worker says what it lacks of what it will hold, so all of them know every message beforehand: who sends which part of
which tensor to whom, and in which order. A message is small, and a worker has few of them in memory at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.state.chunks import MODEL, OPTIMIZER, Catalogue, ChunkBounds, ChunkIndex, TensorChunk
from paceline.state.optimizer_state import is_outside
from paceline.state.packing import bunches, packed_size, packed_views
from paceline.world import World, all_gather_object
from paceline.world.base import Pending

MESSAGE = 16 << 20
"""Bytes of a message; a state of any size moves in messages of at most so many."""
_IN_FLIGHT = 2
"""Messages of one worker that are on their way at a time."""

LocalChunks = Sequence[Mapping[str, TensorChunk]]
"""What one worker has of a state: its own chunks by key, and others' beside them."""
TensorPart = tuple[str, ChunkBounds]
"""A part of a tensor, by the tensor's key."""
Lack = Mapping[str, Sequence[ChunkBounds]]


# Bounds, taken from each other.


def overlap(one: ChunkBounds, other: ChunkBounds) -> ChunkBounds | None:
    """Return what two parts of a tensor have in common, if anything."""
    offset = tuple(map(max, one.offset, other.offset))
    ends = (
        min(start + length, beginning + reach)
        for start, length, beginning, reach in zip(
            one.offset, one.shape, other.offset, other.shape, strict=True
        )
    )
    shape = tuple(end - start for start, end in zip(offset, ends, strict=True))
    return ChunkBounds(offset, shape) if all(length > 0 for length in shape) else None


def remaining(wanted: Iterable[ChunkBounds], held: Iterable[ChunkBounds]) -> list[ChunkBounds]:
    """Return what is left of some parts of a tensor without some others."""
    left = [bounds for bounds in wanted if bounds.numel]
    for other in held:
        left = [rest for bounds in left for rest in _without(bounds, other)]
    return left


def _without(bounds: ChunkBounds, other: ChunkBounds) -> Iterator[ChunkBounds]:
    """Return the parts of some bounds on all sides of what another has of them."""
    common = overlap(bounds, other)
    if common is None:
        yield bounds
        return
    offset, shape = list(bounds.offset), list(bounds.shape)
    for side, (start, length) in enumerate(zip(common.offset, common.shape, strict=True)):
        for first, last in ((offset[side], start), (start + length, offset[side] + shape[side])):
            if first < last:
                yield ChunkBounds(
                    (*offset[:side], first, *offset[side + 1 :]),
                    (*shape[:side], last - first, *shape[side + 1 :]),
                )
        offset[side], shape[side] = start, length


def _within(inner: ChunkBounds, outer: ChunkBounds) -> ChunkBounds:
    """Return where a part of a part is in it."""
    offset = tuple(start - first for start, first in zip(inner.offset, outer.offset, strict=True))
    return ChunkBounds(offset, inner.shape)


# Who sends what to whom.


@dataclass(frozen=True)
class Message:
    """Some parts of tensors that one worker sends to another at once."""

    sender: int
    receiver: int
    parts: tuple[TensorPart, ...]


def own_bounds(chunks: Mapping[str, TensorChunk], catalogue: Catalogue) -> dict[str, ChunkBounds]:
    """Return the bounds of a worker's own part of each tensor: what it has of the model, and the same of the slots.

    Of a tensor in the optimizer's state that is not shaped like its parameter, or belongs to none of the model's, it is all.
    """
    wanted: dict[str, ChunkBounds] = {}
    for key, meta in catalogue.items():
        kind, _, name = key.partition("/")
        if kind == OPTIMIZER:
            name = name.rpartition("/")[0]
        mine = chunks.get(f"{MODEL}/{name}")
        if mine is not None:
            wanted[key] = mine.bounds if meta.shape == mine.meta.shape else ChunkBounds.whole(meta.shape)
        elif kind == OPTIMIZER and is_outside(name):
            wanted[key] = ChunkBounds.whole(meta.shape)
    return wanted


def counted(held: LocalChunks, found: ChunkIndex) -> LocalChunks:
    """Return of what a worker has the chunks that the index counts: it was agreed on those, and on nothing else."""
    return [{key: chunk for key, chunk in chunks.items() if _counts(found, key, chunk)} for chunks in held]


def _counts(found: ChunkIndex, key: str, chunk: TensorChunk) -> bool:
    if found.metas.get(key) != chunk.meta:
        return False
    # Where somebody holds a tensor whole, the parts of it that others hold are not listed.
    holders = found.holders[key]
    return chunk.bounds in holders or ChunkBounds.whole(chunk.meta.shape) in holders


def lacking(wanted: Mapping[str, ChunkBounds], held: LocalChunks) -> dict[str, list[ChunkBounds]]:
    """Return by key the parts of tensors that a worker wants and does not hold."""
    lacks = {
        key: remaining([bounds], (chunks[key].bounds for chunks in held if key in chunks))
        for key, bounds in wanted.items()
    }
    return {key: parts for key, parts in lacks.items() if parts}


def plan(found: ChunkIndex, everybody: Sequence[Lack]) -> list[Message]:
    """Return the messages that bring each rank what it lacks, in the one order in which all deal with them.

    The next neighbours' come first, then those of the ones behind them, so that all send and receive at the same time.
    """
    messages: list[Message] = []
    for receiver, lacks in enumerate(everybody):
        sent: dict[int, list[TensorPart]] = {}
        for key, parts in lacks.items():
            left = list(parts)
            for bounds, holder in found.holders[key].items():
                common = [one for one in (overlap(part, bounds) for part in left) if one is not None]
                sent.setdefault(holder, []).extend((key, one) for one in common)
                left = remaining(left, [bounds])
            if left:
                raise RuntimeError(f"nobody holds {left[0]} of {key}")
        for sender, due in sent.items():
            messages += (Message(sender, receiver, few) for few in _few_at_a_time(due, found.metas))
    return sorted(messages, key=lambda one: (one.receiver - one.sender) % len(everybody))


def _few_at_a_time(parts: Iterable[TensorPart], catalogue: Catalogue) -> Iterator[tuple[TensorPart, ...]]:
    def size(one: TensorPart) -> int:
        key, bounds = one
        return packed_size([(bounds.shape, catalogue[key].dtype)])

    cut = ((key, part) for key, bounds in parts for part in _cut(bounds, catalogue[key].dtype.itemsize))
    return map(tuple, bunches(cut, size, MESSAGE))


def _cut(bounds: ChunkBounds, itemsize: int) -> Iterator[ChunkBounds]:
    """Return bounds that are no larger than a message, which together are the ones given."""
    if bounds.numel * itemsize <= MESSAGE:
        yield bounds
        return
    side = next(side for side, length in enumerate(bounds.shape) if length > 1)
    length = bounds.shape[side]
    step = max(1, length * MESSAGE // (bounds.numel * itemsize))
    for start in range(0, length, step):
        offset, shape = list(bounds.offset), list(bounds.shape)
        offset[side], shape[side] = offset[side] + start, min(step, length - start)
        yield from _cut(ChunkBounds(tuple(offset), tuple(shape)), itemsize)


# The messages.


class Redistribution:
    """What one worker can read of a state once every worker has been sent what it lacked."""

    def __init__(
        self, world: World, held: LocalChunks, found: ChunkIndex, wanted: Mapping[str, ChunkBounds]
    ) -> None:
        """`held` is what this worker has of it; all workers make one together, each with what it will read."""
        held = counted(held, found)
        self._world, self._held, self._found = world, held, found
        self._received: dict[str, list[tuple[ChunkBounds, Tensor]]] = {}
        messages = plan(found, all_gather_object(world.comm, lacking(wanted, held)))
        self.moved = sum(
            bounds.numel * found.metas[key].dtype.itemsize for one in messages for key, bounds in one.parts
        )
        """Bytes of the state that have gone from one worker to another, all of them together."""
        self._exchange(messages)

    def read(self, key: str, bounds: ChunkBounds) -> Tensor:
        """Return the values of a part of a tensor, in memory of their own."""
        here = [(chunks[key].bounds, chunks[key].values) for chunks in self._held if key in chunks]
        dtype, device = self._found.metas[key].dtype, self._world.device
        values = torch.empty(bounds.shape, dtype=dtype, device=device)
        left = [bounds] if bounds.numel else []
        for place, part in (*here, *self._received.get(key, ())):
            for common in (overlap(one, place) for one in left):
                if common is not None:
                    _within(common, bounds).of(values).copy_(_within(common, place).of(part.detach()))
            left = remaining(left, [place])
        if left:
            raise RuntimeError(f"{key}: {bounds} was not asked for beforehand")
        return values

    def _exchange(self, messages: Sequence[Message]) -> None:
        """Send and receive in the order of the plan: whoever waits, waits for an earlier message than any it is waited for."""
        world, leaving = self._world, deque[Pending[None]]()
        for message in messages:
            if message.sender == world.rank:
                if len(leaving) == _IN_FLIGHT:
                    leaving.popleft().wait()
                leaving.append(world.comm.isend(self._packed(message), message.receiver))
            elif message.receiver == world.rank:
                size = packed_size(self._layout(message))
                like = torch.empty(1, dtype=torch.uint8, device=world.device).expand(size)  # without memory
                self._unpack(message, world.comm.recv(like=like, source=message.sender))
        for one in leaving:
            one.wait()

    def _packed(self, message: Message) -> Tensor:
        layout = self._layout(message)
        buffer = torch.empty(packed_size(layout), dtype=torch.uint8, device=self._world.device)
        for (key, bounds), view in zip(message.parts, packed_views(buffer, layout), strict=True):
            chunk = next(
                chunks[key]
                for chunks in self._held
                if key in chunks and overlap(bounds, chunks[key].bounds) == bounds
            )
            view.copy_(_within(bounds, chunk.bounds).of(chunk.values.detach()))
        return buffer

    def _unpack(self, message: Message, buffer: Tensor) -> None:
        views = packed_views(buffer, self._layout(message))
        for (key, bounds), view in zip(message.parts, views, strict=True):
            self._received.setdefault(key, []).append((bounds, view))

    def _layout(self, message: Message) -> list[tuple[tuple[int, ...], torch.dtype]]:
        return [(bounds.shape, self._found.metas[key].dtype) for key, bounds in message.parts]
