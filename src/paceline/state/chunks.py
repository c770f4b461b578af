"""State that is sharded among workers: who holds which chunk of which tensor, and how whole tensors come of them.

Every tensor of a run's state has a key, `model/NAME` or `optimizer/NAME/SLOT`, that does not depend on the strategy. A
worker holds a chunk of each, the whole or a part. What is no tensor (groups, schedule, scaler) is the same on all workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.state.packing import bunches, packed_size, packed_views
from paceline.world import World, all_gather_object

MODEL, OPTIMIZER = "model", "optimizer"
AVERAGE = "average"
"""What an optimizer keeps of a weight that is averaged over steps: optimizer/NAME/average."""
TOGETHER = 64 << 20
"""Bytes of whole tensors that are put together at once."""


@dataclass(frozen=True)
class TensorMeta:
    """What a whole tensor is, without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Return its bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class ChunkBounds:
    """A part of a whole tensor: where it begins and how far it reaches."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Iterable[int]) -> ChunkBounds:
        """Return the bounds of everything."""
        shape = tuple(shape)
        return cls((0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        """Return how many values it holds."""
        return torch.Size(self.shape).numel()

    def of(self, whole: Tensor) -> Tensor:
        """Return the view of a whole tensor within these bounds."""
        for side, (start, length) in enumerate(zip(self.offset, self.shape, strict=True)):
            whole = whole.narrow(side, start, length)
        return whole


@dataclass(frozen=True)
class TensorChunk:
    """What one worker holds of one tensor."""

    values: Tensor
    """A plain tensor, in no need of a copy: it may be the very memory that training writes to."""
    bounds: ChunkBounds
    meta: TensorMeta

    @classmethod
    def whole(cls, values: Tensor) -> TensorChunk:
        """Return a tensor that this worker holds all of."""
        return cls(values, ChunkBounds.whole(values.shape), TensorMeta(tuple(values.shape), values.dtype))


Catalogue = Mapping[str, TensorMeta]
Read = Callable[[str, ChunkBounds], Tensor]
"""Returns the values of a part of a tensor; the caller copies them."""


@dataclass(frozen=True)
class LocalState:
    """All that one worker holds of a run's state."""

    chunks: dict[str, TensorChunk]
    extra_state: dict[str, Any]
    """Groups and plain values of the optimizer, schedule, scaler: the same on all workers."""
    answers_for: frozenset[str] = frozenset()
    """The parameters whose slots are here, as far as the chunks of them reach: of one without any the optimizer keeps none.

    A strategy that does not say so is believed to have lost slots where some parameters have theirs and others have none.
    """

    @property
    def bytes(self) -> int:
        """Return how much it is."""
        return sum(chunk.bounds.numel * chunk.meta.dtype.itemsize for chunk in self.chunks.values())


# A whole state, as `Replica.state` gives it, and the same as chunks.


def split(state: Mapping[str, Any]) -> LocalState:
    """Take a whole state apart into whole chunks and the extra state."""
    check_saved(state[MODEL])
    chunks = {f"{MODEL}/{name}": TensorChunk.whole(value.detach()) for name, value in state[MODEL].items()}
    slots, plain = held_slots(state[OPTIMIZER]["state"], {})
    chunks |= slots
    extra_state = {key: value for key, value in state.items() if key not in (MODEL, OPTIMIZER)}
    described = {**extra_state, OPTIMIZER: {**state[OPTIMIZER], "state": plain}}
    return LocalState(chunks, described, frozenset(state[MODEL]))


def check_saved(saved: Mapping[str, Any]) -> None:
    """Refuse a model whose `state_dict` holds something else than tensors: it would be lost."""
    foreign = next((name for name, value in saved.items() if not isinstance(value, Tensor)), None)
    if foreign is not None:
        raise CheckpointError(
            f"cannot hold {foreign} of the model's state: it is a {type(saved[foreign]).__name__}, not a tensor. "
            "Keep it out of state_dict(), or give it as a buffer."
        )


def assemble(tensors: Mapping[str, Tensor], extra_state: Mapping[str, Any]) -> dict[str, Any]:
    """Put a whole state together from whole tensors by key and the extra state."""
    model = {key.partition("/")[2]: value for key, value in tensors.items() if key.startswith(f"{MODEL}/")}
    slots = {name: dict(plain) for name, plain in extra_state[OPTIMIZER]["state"].items()}
    for key, value in tensors.items():
        if key.startswith(f"{OPTIMIZER}/"):
            name, slot = _name_and_slot(key)
            slots.setdefault(name, {})[slot] = value
    behind = {key: extra_state[key] for key in ("scheduler", "scaler") if key in extra_state}
    before = {key: value for key, value in extra_state.items() if key not in (OPTIMIZER, *behind)}
    # In the order in which one process has it.
    return {**before, MODEL: model, OPTIMIZER: {**extra_state[OPTIMIZER], "state": slots}, **behind}


def slot_key(name: str, slot: Any) -> str:
    """Return the key of a tensor that an optimizer keeps; its last part has no slash, whatever the optimizer calls it."""
    if not isinstance(slot, str):
        raise CheckpointError(
            f"cannot hold what the optimizer keeps of {name} under {slot!r}: it is a {type(slot).__name__}, not text. "
            "Use a text as the key in the optimizer's state."
        )
    return f"{OPTIMIZER}/{name}/{slot.replace('%', '%25').replace('/', '%2F')}"


def _name_and_slot(key: str) -> tuple[str, str]:
    name, _, slot = key.partition("/")[2].rpartition("/")
    return name, slot.replace("%2F", "/").replace("%25", "%")


# The state of a worker that has a part of each parameter.


class ParameterPart(Protocol):
    """What a worker has of one parameter."""

    @property
    def values(self) -> Tensor:
        """What the optimizer works on."""

    @property
    def bounds(self) -> ChunkBounds:
        """The bounds of this part in the whole tensor."""

    @property
    def meta(self) -> TensorMeta:
        """What it is a part of."""


Parts = Mapping[str, ParameterPart]
Slots = Mapping[str, Mapping[str, Any]]
"""What an optimizer keeps of each parameter, by name."""


def held_slots(state: Slots, parts: Parts) -> tuple[dict[str, TensorChunk], dict[str, dict[str, Any]]]:
    """Return the tensors of an optimizer's state by key, and by name what is none; a slot as large as a part is cut like it."""
    chunks: dict[str, TensorChunk] = {}
    others: dict[str, dict[str, Any]] = {}
    for name, slots in state.items():
        others[name] = {}
        part = parts.get(name)
        for slot, value in slots.items():
            if not isinstance(value, Tensor):
                others[name][slot] = value
            elif part is not None and value.dim() and value.shape == part.values.shape:
                meta = TensorMeta(part.meta.shape, value.dtype)
                chunks[slot_key(name, slot)] = TensorChunk(value, part.bounds, meta)
            else:
                chunks[slot_key(name, slot)] = TensorChunk.whole(value)
    return chunks, others


def read_slots(catalogue: Catalogue, read: Read, parts: Parts) -> dict[str, dict[str, Tensor]]:
    """Return of a whole optimizer's state the tensors that belong to some parts, by name; the optimizer may keep them."""
    state: dict[str, dict[str, Tensor]] = {}
    for key, meta in catalogue.items():
        if not key.startswith(f"{OPTIMIZER}/"):
            continue
        name, slot = _name_and_slot(key)
        if name in parts:
            part = parts[name]
            bounds = part.bounds if meta.shape == part.meta.shape else ChunkBounds.whole(meta.shape)
            state.setdefault(name, {})[slot] = read(key, bounds).clone()
    return state


def read_whole(
    catalogue: Catalogue, read: Read, extra_state: Mapping[str, Any], keeps: Callable[[str, str], bool]
) -> dict[str, Any]:
    """Return a state of whole tensors with what a worker keeps: `keeps` is asked for the section and the name of each."""
    tensors: dict[str, Tensor] = {}
    for key, meta in catalogue.items():
        section, _, path = key.partition("/")
        name = path if section == MODEL else path.rpartition("/")[0]
        if keeps(section, name):
            values = read(key, ChunkBounds.whole(meta.shape))
            # An optimizer goes on with the very tensors it is given.
            tensors[key] = values if section == MODEL else values.clone()
    state = assemble(tensors, extra_state)
    slots = {name: one for name, one in state[OPTIMIZER]["state"].items() if keeps(OPTIMIZER, name)}
    return {**state, OPTIMIZER: {**state[OPTIMIZER], "state": slots}}


def check_type(name: str, there: torch.dtype, here: torch.dtype) -> None:
    """Raise where a saved tensor would be rounded, or made wider, on its way into a model."""
    if there != here:
        raise CheckpointError(
            f"{name} is of {str(there).removeprefix('torch.')} in the state, and of {str(here).removeprefix('torch.')} here. "
            "Use the task that wrote it, with the settings it had."
        )


@torch.no_grad()
def read_model(chunks: Mapping[str, TensorChunk], catalogue: Catalogue, read: Read) -> None:
    """Write a whole model's values into what a worker has of it, by key."""
    for key, chunk in chunks.items():
        meta = catalogue.get(key)
        if meta is None or meta.shape != chunk.meta.shape:
            there = "is missing" if meta is None else f"has the shape {meta.shape}"
            raise CheckpointError(
                f"{key.partition('/')[2]} {there} in the state, and has the shape {chunk.meta.shape} here. "
                "Use the task that wrote it."
            )
        check_type(key.partition("/")[2], meta.dtype, chunk.meta.dtype)
        chunk.values.copy_(read(key, chunk.bounds))


# Whole tensors from the chunks of all workers.


@dataclass(frozen=True)
class ChunkIndex:
    """What everybody holds, without the values."""

    metas: dict[str, TensorMeta]
    holders: dict[str, dict[ChunkBounds, int]]
    """For each tensor the chunks that make it up, and the rank that answers for each."""


def survey(world: World, chunks: Mapping[str, TensorChunk]) -> ChunkIndex:
    """Learn who holds what; where several hold the same chunk, the first of them answers for it."""
    return index_of(all_gather_object(world.comm, rows_of(chunks)))


def rows_of(chunks: Mapping[str, TensorChunk]) -> dict[str, tuple[TensorMeta, ChunkBounds]]:
    """Return what chunks there are, without the values."""
    return {key: (chunk.meta, chunk.bounds) for key, chunk in chunks.items()}


def index_of(everybody: Iterable[Mapping[str, tuple[TensorMeta, ChunkBounds]]]) -> ChunkIndex:
    """Put together what each rank says it holds."""
    metas: dict[str, TensorMeta] = {}
    holders: dict[str, dict[ChunkBounds, int]] = {}
    for rank, held in enumerate(everybody):
        for key, (meta, bounds) in held.items():
            if metas.setdefault(key, meta) != meta:
                raise CheckpointError(f"{key} is {metas[key]} on one worker and {meta} on rank {rank}.")
            known = holders.setdefault(key, {})
            # A tensor that somebody holds whole comes from that one.
            if ChunkBounds.whole(meta.shape) not in known:
                if bounds == ChunkBounds.whole(meta.shape):
                    known.clear()
                if bounds.numel or not meta.size:
                    known.setdefault(bounds, rank)
    return ChunkIndex(metas, holders)


def collect(
    world: World, chunks: Mapping[str, TensorChunk], found: ChunkIndex
) -> Iterator[tuple[str, Tensor]]:
    """Return every tensor whole, one after the other, to everybody; no more than `TOGETHER` bytes of them at a time."""
    for keys in bunches(found.metas, lambda key: found.metas[key].size, TOGETHER):
        whole = {
            key: torch.empty(found.metas[key].shape, dtype=found.metas[key].dtype, device=world.device)
            for key in keys
        }
        for rank in sorted({rank for key in keys for rank in found.holders[key].values()}):
            sent = [
                (key, bounds)
                for key in keys
                for bounds, holder in found.holders[key].items()
                if holder == rank
            ]
            _spread(world, rank, sent, whole, chunks, found)
        yield from whole.items()


def _spread(
    world: World,
    rank: int,
    sent: list[tuple[str, ChunkBounds]],
    whole: dict[str, Tensor],
    chunks: Mapping[str, TensorChunk],
    found: ChunkIndex,
) -> None:
    """Bring one worker's chunks of some tensors to everybody, as one message of bytes."""
    layout = [(bounds.shape, found.metas[key].dtype) for key, bounds in sent]
    buffer = torch.empty(packed_size(layout), dtype=torch.uint8, device=world.device)
    if world.rank == rank:
        for (key, _), view in zip(sent, packed_views(buffer, layout), strict=True):
            view.copy_(chunks[key].values)
    got = buffer if world.size == 1 else world.comm.broadcast(buffer, rank)
    for (key, bounds), view in zip(sent, packed_views(got, layout), strict=True):
        bounds.of(whole[key]).copy_(view)
