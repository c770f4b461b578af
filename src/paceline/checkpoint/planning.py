"""Who writes what: each chunk of the state goes into one part, and each part is written by one worker.

A chunk that only one worker holds is written by that one. What several hold is dealt out among those of them that see
the folder, by size; little enough is written by the first of them alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.checkpoint.stored import Stored, StoredChunk
from paceline.checkpoint.tensors import tied
from paceline.errors import CheckpointError
from paceline.state.chunks import ChunkBounds, TensorChunk, TensorMeta

ALONE = 16 << 20
"""Bytes that one worker writes sooner than several could agree on the end of it: 0.05 s, hash included."""


@dataclass(frozen=True)
class ShardInventory:
    """What one worker could write."""

    host: str
    chunks: dict[str, tuple[TensorMeta, ChunkBounds]]
    aliases: dict[str, str]

    @classmethod
    def of(cls, host: str, chunks: Mapping[str, TensorChunk]) -> ShardInventory:
        """Return it for the chunks that a worker holds; an empty chunk of something is nothing."""
        held = {
            key: (chunk.meta, chunk.bounds)
            for key, chunk in chunks.items()
            if chunk.bounds.numel or not chunk.meta.size
        }
        return cls(host, held, tied(chunks))


@dataclass(frozen=True)
class WritePlan:
    """Which part holds which chunk, and who writes which part."""

    tensors: dict[str, Stored]
    aliases: dict[str, str]
    writers: tuple[int, ...]
    """The rank that writes each part."""
    keys: tuple[tuple[str, ...], ...] = field(repr=False)
    """What each part holds."""

    def part_of(self, rank: int) -> int | None:
        """Return the number of the part that a worker writes, if it writes one."""
        return self.writers.index(rank) if rank in self.writers else None


def assign_writers(inventories: Sequence[ShardInventory], sees: Sequence[bool] | None = None) -> WritePlan:
    """Deal the state out among workers, all of which see the folder, or those that do."""
    metas, aliases = _metas(inventories), _aliases(inventories)
    wanted = [_wanted(inventory, metas, aliases, inventories) for inventory in inventories]
    if sees is not None and not all(sees):
        wanted = _seen(wanted, sees, inventories)
    first = wanted[0]
    size = sum(meta.size for key, meta in metas.items() if key not in aliases)
    if len(first) == len(metas) - len(aliases) and all(
        bounds == ChunkBounds.whole(metas[key].shape) for key, bounds in first.items()
    ):
        others = any(wanted[1:])
        if not others or size < ALONE:
            return _plan(metas, aliases, [first])
    # torch.distributed.checkpoint takes over a second to load: not before there is something to plan.
    from paceline.checkpoint.distributed import deal

    return _plan(metas, aliases, deal(metas, wanted, spread=size >= ALONE))


def _plan(
    metas: Mapping[str, TensorMeta], aliases: dict[str, str], dealt: Sequence[Mapping[str, ChunkBounds]]
) -> WritePlan:
    writers = tuple(rank for rank, chunks in enumerate(dealt) if chunks) or (0,)
    found: dict[str, list[StoredChunk]] = {key: [] for key in metas if key not in aliases}
    for part, rank in enumerate(writers):
        for key, bounds in dealt[rank].items():
            found[key].append(StoredChunk(part, bounds.offset, bounds.shape))
    tensors = {
        key: Stored(metas[key].shape, str(metas[key].dtype).removeprefix("torch."), tuple(chunks))
        for key, chunks in found.items()
    }
    return WritePlan(tensors, aliases, writers, tuple(tuple(dealt[rank]) for rank in writers))


def _metas(inventories: Sequence[ShardInventory]) -> dict[str, TensorMeta]:
    metas: dict[str, TensorMeta] = {}
    for rank, inventory in enumerate(inventories):
        for key, (meta, _) in inventory.chunks.items():
            if metas.setdefault(key, meta) != meta:
                raise CheckpointError(
                    f"cannot save {key}: it is {metas[key]} on one worker and {meta} on rank {rank}. "
                    "Make the same model on all workers."
                )
    return metas


def _aliases(inventories: Sequence[ShardInventory]) -> dict[str, str]:
    """Return the tied weights on which all that hold them agree; others are stored as they are."""
    agreed: dict[str, str] = {}
    for inventory in inventories:
        agreed.update(inventory.aliases)
    return {
        alias: key
        for alias, key in agreed.items()
        if all(inventory.aliases.get(alias) == key for inventory in inventories if alias in inventory.chunks)
    }


def _wanted(
    inventory: ShardInventory,
    metas: Mapping[str, TensorMeta],
    aliases: Mapping[str, str],
    inventories: Sequence[ShardInventory],
) -> dict[str, ChunkBounds]:
    """Return what a worker could write: of a tensor that somebody holds whole, nobody's smaller chunks."""
    wanted = {}
    for key, (meta, bounds) in inventory.chunks.items():
        whole = ChunkBounds.whole(metas[key].shape)
        if key not in aliases and (
            bounds == whole or not any(other.chunks.get(key) == (meta, whole) for other in inventories)
        ):
            wanted[key] = bounds
    return wanted


def _seen(
    wanted: list[dict[str, ChunkBounds]], sees: Sequence[bool], inventories: Sequence[ShardInventory]
) -> list[dict[str, ChunkBounds]]:
    """Leave out those that do not see the folder, if others hold what they hold."""
    reached = {item for chunks, seen in zip(wanted, sees, strict=True) if seen for item in chunks.items()}
    for rank, (chunks, seen) in enumerate(zip(wanted, sees, strict=True)):
        lost = [] if seen else [key for key, bounds in chunks.items() if (key, bounds) not in reached]
        if lost:
            raise CheckpointError(
                f"rank {rank} on {inventories[rank].host} does not see the folder of the run, and alone holds {lost[0]}"
                f"{f' and {len(lost) - 1} more' if lost[1:] else ''}. Put --out on a disk that all machines share."
            )
    return [chunks if seen else {} for chunks, seen in zip(wanted, sees, strict=True)]
