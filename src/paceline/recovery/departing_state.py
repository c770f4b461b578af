"""What a worker that leaves a sharded state writes down for the others: its part, as a file in the run folder.

It is written before the worker says that it has left its group, so it lies there when the next group forms, and is
removed as soon as that group holds everything.
"""

from __future__ import annotations

import os
import pickle
import secrets
from dataclasses import asdict
from pathlib import Path

import torch

from paceline.checkpoint.contents import own_slots
from paceline.recovery.position import Position
from paceline.state.chunks import ChunkBounds, LocalState, TensorChunk, TensorMeta

_PREFIX = ".left-by-"


def write(folder: Path, position: Position, held: LocalState) -> None:
    """Write this worker's part down, whole or not at all."""
    final = folder / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(4)}.pt"
    partial = final.with_suffix(".partial")
    with partial.open("wb") as file:
        torch.save(
            {
                "position": asdict(position),
                "slots": own_slots(held.extra_state),
                "answers_for": sorted(held.answers_for),
                "chunks": [
                    (
                        key,
                        one.meta.shape,
                        one.meta.dtype,
                        one.bounds.offset,
                        one.values.detach().cpu().contiguous(),
                    )
                    for key, one in held.chunks.items()
                ],
            },
            file,
        )
    partial.replace(final)


def read(folder: Path) -> dict[int, list[LocalState]]:
    """Return what lies there, by the number of steps it was left after; no tensor is read before it is used."""
    found: dict[int, list[LocalState]] = {}
    for path in sorted(folder.glob(f"{_PREFIX}*.pt")):
        try:
            left = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (OSError, RuntimeError, pickle.UnpicklingError):
            continue  # another worker has removed it: the group before this one holds everything
        chunks = {
            key: TensorChunk(
                values, ChunkBounds(tuple(offset), tuple(values.shape)), TensorMeta(tuple(shape), dtype)
            )
            for key, shape, dtype, offset, values in left["chunks"]
        }
        found.setdefault(left["position"]["number"], []).append(
            LocalState(chunks, left["slots"], frozenset(left["answers_for"]))
        )
    return found


def remove(folder: Path) -> None:
    """Clear away what has been taken over."""
    for path in folder.glob(f"{_PREFIX}*"):
        path.unlink(missing_ok=True)
