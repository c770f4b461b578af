"""Who writes what: each piece of the state goes into one part, and each part is written by one worker.

A piece that only one worker holds is written by that one. What several hold is dealt out among those of them that see
the folder, by size; little enough is written by the first of them alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.checkpoint.stored import Stored, StoredBox
from paceline.checkpoint.tensors import tied
from paceline.errors import CheckpointError
from paceline.state.chunks import ChunkBounds, TensorChunk, TensorMeta

ALONE = 16 << 20
"""Bytes that one worker writes sooner than several could agree on the end of it: 0.05 s, hash included."""


@dataclass(frozen=True)
class ShardInventory:
    """What one worker could write."""

    host: str
    pieces: dict[str, tuple[TensorMeta, ChunkBounds]]
    aliases: dict[str, str]

    @classmethod
    def of(cls, host: str, pieces: Mapping[str, TensorChunk]) -> ShardInventory:
        """Return it for the pieces that a worker holds; an empty piece of something is nothing."""
        held = {
            key: (piece.form, piece.box)
            for key, piece in pieces.items()
            if piece.box.numel or not piece.form.size
        }
        return cls(host, held, tied(pieces))


@dataclass(frozen=True)
class Plan:
    """Which part holds which piece, and who writes which part."""

    tensors: dict[str, Stored]
    aliases: dict[str, str]
    writers: tuple[int, ...]
    """The rank that writes each part."""
    keys: tuple[tuple[str, ...], ...] = field(repr=False)
    """What each part holds."""

    def part_of(self, rank: int) -> int | None:
        """Return the number of the part that a worker writes, if it writes one."""
        return self.writers.index(rank) if rank in self.writers else None


def assign_writers(offers: Sequence[ShardInventory], sees: Sequence[bool] | None = None) -> Plan:
    """Deal the state out among workers, all of which see the folder, or those that do."""
    forms, aliases = _forms(offers), _aliases(offers)
    wanted = [_wanted(offer, forms, aliases, offers) for offer in offers]
    if sees is not None and not all(sees):
        wanted = _seen(wanted, sees, offers)
    first = wanted[0]
    size = sum(form.size for key, form in forms.items() if key not in aliases)
    if len(first) == len(forms) - len(aliases) and all(
        box == ChunkBounds.whole(forms[key].shape) for key, box in first.items()
    ):
        others = any(wanted[1:])
        if not others or size < ALONE:
            return _plan(forms, aliases, [first])
    # torch.distributed.checkpoint takes over a second to load: not before there is something to plan.
    from paceline.checkpoint.distributed import deal

    return _plan(forms, aliases, deal(forms, wanted, spread=size >= ALONE))


def _plan(
    forms: Mapping[str, TensorMeta], aliases: dict[str, str], dealt: Sequence[Mapping[str, ChunkBounds]]
) -> Plan:
    writers = tuple(rank for rank, boxes in enumerate(dealt) if boxes) or (0,)
    found: dict[str, list[StoredBox]] = {key: [] for key in forms if key not in aliases}
    for part, rank in enumerate(writers):
        for key, box in dealt[rank].items():
            found[key].append(StoredBox(part, box.offset, box.shape))
    tensors = {
        key: Stored(forms[key].shape, str(forms[key].dtype).removeprefix("torch."), tuple(boxes))
        for key, boxes in found.items()
    }
    return Plan(tensors, aliases, writers, tuple(tuple(dealt[rank]) for rank in writers))


def _forms(offers: Sequence[ShardInventory]) -> dict[str, TensorMeta]:
    forms: dict[str, TensorMeta] = {}
    for rank, offer in enumerate(offers):
        for key, (form, _) in offer.pieces.items():
            if forms.setdefault(key, form) != form:
                raise CheckpointError(
                    f"cannot save {key}: it is {forms[key]} on one worker and {form} on rank {rank}. "
                    "Make the same model on all workers."
                )
    return forms


def _aliases(offers: Sequence[ShardInventory]) -> dict[str, str]:
    """Return the tied weights on which all that hold them agree; others are stored as they are."""
    agreed: dict[str, str] = {}
    for offer in offers:
        agreed.update(offer.aliases)
    return {
        alias: key
        for alias, key in agreed.items()
        if all(offer.aliases.get(alias) == key for offer in offers if alias in offer.pieces)
    }


def _wanted(
    offer: ShardInventory,
    forms: Mapping[str, TensorMeta],
    aliases: Mapping[str, str],
    offers: Sequence[ShardInventory],
) -> dict[str, ChunkBounds]:
    """Return what a worker could write: of a tensor that somebody holds whole, nobody's smaller pieces."""
    wanted = {}
    for key, (form, box) in offer.pieces.items():
        whole = ChunkBounds.whole(forms[key].shape)
        if key not in aliases and (
            box == whole or not any(other.pieces.get(key) == (form, whole) for other in offers)
        ):
            wanted[key] = box
    return wanted


def _seen(
    wanted: list[dict[str, ChunkBounds]], sees: Sequence[bool], offers: Sequence[ShardInventory]
) -> list[dict[str, ChunkBounds]]:
    """Leave out those that do not see the folder, if others hold what they hold."""
    reached = {item for boxes, seen in zip(wanted, sees, strict=True) if seen for item in boxes.items()}
    for rank, (boxes, seen) in enumerate(zip(wanted, sees, strict=True)):
        lost = [] if seen else [key for key, box in boxes.items() if (key, box) not in reached]
        if lost:
            raise CheckpointError(
                f"rank {rank} on {offers[rank].host} does not see the folder of the run, and alone holds {lost[0]}"
                f"{f' and {len(lost) - 1} more' if lost[1:] else ''}. Put --out on a disk that all machines share."
            )
    return [boxes if seen else {} for boxes, seen in zip(wanted, sees, strict=True)]
