"""How a sharded state comes to the workers of a new group: from those who are left, or from further away.

The nearest source that holds all of it wins: the parts that the workers hold now (with a replica of the lost one's, as
in a hybrid mesh), else the snapshots in their neighbours' memory, else the newest checkpoint, else the beginning, which
anybody can make again from the seed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from paceline.recovery.position import Position
from paceline.state.chunks import (
    MODEL,
    OPTIMIZER,
    ChunkBounds,
    ChunkIndex,
    TensorChunk,
    TensorMeta,
    index_of,
    rows_of,
)
from paceline.state.redistribution import Redistribution, remaining
from paceline.strategies.replica import Replica
from paceline.world import World, all_gather_object

WORKERS, SNAPSHOTS, CHECKPOINT, BEGINNING = "workers", "copies", "checkpoint", "beginning"
Rows = Mapping[str, tuple[TensorMeta, ChunkBounds]]
_NO_SLOT = "%"
"""Stands where the name of a slot does, for a parameter of which the optimizer keeps none; a key has no `%` alone."""


@dataclass(frozen=True)
class StateInventory:
    """What one worker of a new group can bring."""

    finished: int
    """How many operations it has done with the others; below 0 for one that joins."""
    position: Position
    rows: Rows = field(default_factory=dict)
    """What it holds now."""
    snapshots: Mapping[int, tuple[Position, Sequence[Rows]]] = field(default_factory=dict)
    """What it has put aside, by the number of steps: its own part, and its neighbour's."""
    departing: Mapping[int, Sequence[Rows]] = field(default_factory=dict)
    """What workers that left have written down where it sees it, by the number of steps."""
    checkpoint: int | None = None
    """The newest one it sees on disk."""
    outline: Mapping[str, bool] = field(default_factory=dict)
    """Every tensor of the model, wherever it is held, and whether it is trained."""


@dataclass(frozen=True)
class StateSource:
    """Where the state comes from."""

    kind: str
    position: Position
    """Where the run goes on."""
    bringers: tuple[int, ...] = ()
    """The ranks that bring parts of it."""
    found: ChunkIndex = field(default_factory=lambda: ChunkIndex({}, {}))


def inventory_rows(chunks: Mapping[str, TensorChunk], answers_for: Collection[str]) -> Rows:
    """Return what chunks there are, and a row for the part of each parameter of which the optimizer keeps nothing."""
    rows = rows_of(chunks)
    served = {_parameter_of(key) for key in chunks if key.startswith(f"{OPTIMIZER}/")}
    bare = [name for name in sorted(answers_for) if name not in served and f"{MODEL}/{name}" in rows]
    return rows | {f"{OPTIMIZER}/{name}/{_NO_SLOT}": rows[f"{MODEL}/{name}"] for name in bare}


def choose(inventories: Sequence[StateInventory]) -> StateSource:
    """Find the furthest state that is whole somewhere; of equals the nearest. The same on all workers."""
    ranked = [(source.position.number, -place, source) for place, source in enumerate(_sources(inventories))]
    return max(ranked, key=lambda one: one[:2])[2]


def _sources(inventories: Sequence[StateInventory]) -> list[StateSource]:
    """Return all that are whole, the nearest first."""
    sources = []
    outline = max((one.outline for one in inventories), key=len)
    living = [rank for rank, one in enumerate(inventories) if one.finished >= 0]
    for number in sorted({inventories[rank].position.number for rank in living}, reverse=True):
        ranks = tuple(rank for rank in living if inventories[rank].position.number == number)
        found = index_of([one.rows if rank in ranks else {} for rank, one in enumerate(inventories)])
        _add(found, [one.departing.get(number, ()) for one in inventories])
        if _is_whole(found, outline):
            # Of these the furthest ahead: it may stand in the next epoch already.
            ahead = max(ranks, key=lambda rank: (inventories[rank].finished, -rank))
            sources.append(StateSource(WORKERS, inventories[ahead].position, ranks, found))
    for number in sorted({number for one in inventories for number in one.snapshots}, reverse=True):
        ranks = tuple(rank for rank, one in enumerate(inventories) if number in one.snapshots)
        found = _in_snapshots(inventories, number)
        if _is_whole(found, outline):
            sources.append(StateSource(SNAPSHOTS, inventories[ranks[0]].snapshots[number][0], ranks, found))
    if inventories[0].checkpoint is not None:
        sources.append(StateSource(CHECKPOINT, Position(number=inventories[0].checkpoint)))
    return [*sources, StateSource(BEGINNING, Position())]


def _in_snapshots(inventories: Sequence[StateInventory], number: int) -> ChunkIndex:
    """Return what snapshots hold together: first everybody's own part, then the neighbours'."""
    parts = [one.snapshots[number][1] if number in one.snapshots else () for one in inventories]
    found = index_of([rows[0] if rows else {} for rows in parts])
    _add(found, [rows[1:] for rows in parts])
    return found


def _add(found: ChunkIndex, more: Sequence[Sequence[Rows]]) -> None:
    """Add what each rank can bring beside its own part."""
    for rank, parts in enumerate(more):
        for key, (meta, bounds) in (item for rows in parts for item in rows.items()):
            if found.metas.setdefault(key, meta) != meta:
                continue  # another tensor of that name: its values would be taken for this one's
            holders = found.holders.setdefault(key, {})
            if bounds.numel and ChunkBounds.whole(meta.shape) not in holders:
                holders.setdefault(bounds, rank)


def _is_whole(found: ChunkIndex, outline: Mapping[str, bool]) -> bool:
    """Return whether nothing is missing: no part of a tensor, no tensor, no parameter's slots where others have theirs.

    A parameter may have none if whoever answers for each part of it says so. What says so is no tensor, and is taken out.
    """
    said = {key: found.holders.pop(key) for key in list(found.metas) if key.endswith(f"/{_NO_SLOT}")}
    shapes = {key: found.metas.pop(key).shape for key in said}
    bare = {_parameter_of(key) for key, holders in said.items() if _cover(shapes[key], frozenset(holders))}
    if not outline or not outline.keys() <= found.metas.keys():
        return False
    if not all(_cover(meta.shape, frozenset(found.holders[key])) for key, meta in found.metas.items()):
        return False
    served = {_parameter_of(key) for key in found.metas if key.startswith(f"{OPTIMIZER}/")}
    trained = {key.removeprefix(f"{MODEL}/") for key, trains in outline.items() if trains}
    return not served or trained <= served | bare


def _parameter_of(slot: str) -> str:
    """Return whose slot a key is of."""
    return slot.partition("/")[2].rpartition("/")[0]


@lru_cache(maxsize=4096)
def _cover(shape: tuple[int, ...], chunks: frozenset[ChunkBounds]) -> bool:
    """Return whether some chunks leave nothing of a tensor out; those of two groups lie over each other, so no sum tells."""
    return not remaining([ChunkBounds.whole(shape)], chunks)


def receive(
    world: World,
    source: StateSource,
    mine: Sequence[Mapping[str, TensorChunk]],
    extra_state: Mapping[str, Any] | None,
    replica: Replica,
) -> int:
    """Have a replica load its part of what everybody holds, and return the bytes that moved; all workers call it."""
    catalogue = source.found.metas
    extra_states = [one for one in all_gather_object(world.comm, extra_state) if one is not None]
    there = Redistribution(world, mine, source.found, replica.wanted(catalogue))
    replica.load_local_state(catalogue, there.read, merge_extra_states(extra_states))
    return there.moved


def merge_extra_states(extra_states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Put together what workers know beside the tensors: each may know its own parameters only."""
    first = extra_states[0]
    groups = [dict(group) for group in first[OPTIMIZER]["groups"]]
    plain: dict[str, Any] = {}
    for extra_state in extra_states:
        plain |= extra_state[OPTIMIZER]["state"]
        for group, more in zip(groups, extra_state[OPTIMIZER]["groups"], strict=True):
            names = group["params"]
            group["params"] = [*names, *(name for name in more["params"] if name not in names)]
    return {**first, OPTIMIZER: {**first[OPTIMIZER], "groups": groups, "state": plain}}
