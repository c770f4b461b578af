"""Reading one checkpoint: every byte is verified, and nothing but tensors and numbers is unpickled."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint.durable import verify
from paceline.checkpoint.extra_state import read_extra_state
from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.parts import StoredTensors, dtype_named
from paceline.errors import CheckpointError
from paceline.state.chunks import ChunkBounds, assemble


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A checkpoint in memory, its tensors on the CPU."""

    step: int
    position: dict[str, int]
    meta: dict[str, Any]
    state: dict[str, Any]
    """Everything that was given to `save`, position and meta included."""
    path: Path


def load(path: Path) -> Loaded:
    """Read the checkpoint in one folder."""
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint at {path}. Give the folder of one, such as step-100.")
    try:
        return read(path)
    except CheckpointError as error:
        raise unusable(path, error) from error


def unusable(path: Path, reason: CheckpointError) -> CheckpointError:
    """Make a line for the user of the bare reason why a checkpoint cannot serve."""
    return CheckpointError(
        f"{path} cannot be used: {reason}. Use an earlier checkpoint, or start without one."
    )


def read(path: Path) -> Loaded:
    """Read the checkpoint in one folder; a CheckpointError holds the bare reason why that cannot be done."""
    manifest = verified(path)
    with StoredTensors(path, manifest) as parts:
        tensors = {
            key: parts.read(key, ChunkBounds.whole(parts.catalogue[key].shape)) for key in manifest.tensors
        }
    tensors.update({alias: tensors[key] for alias, key in manifest.aliases.items()})
    state = {
        **assemble(tensors, read_extra_state(path)),
        "position": manifest.position,
        "meta": manifest.meta,
    }
    return Loaded(step=manifest.step, position=manifest.position, meta=manifest.meta, state=state, path=path)


def verified(path: Path, hashed: Callable[[Manifest], Collection[str]] = lambda one: one.files) -> Manifest:
    """Return the manifest of a checkpoint whose files are all there in full length; those `hashed` (all) are read.

    A CheckpointError holds the bare reason why it cannot serve.
    """
    manifest = Manifest.read(path)
    for dtype in {stored.dtype for stored in manifest.tensors.values()}:
        dtype_named(dtype)
    missing = [name for name in manifest.parts if not (path / name).exists()]
    if missing and path.is_dir():
        needed = len(manifest.parts)
        raise CheckpointError(
            f"{path.name} needs {needed} part{'s'[: needed > 1]} and has {needed - len(missing)}: "
            f"{', '.join(missing)} {'are' if missing[1:] else 'is'} missing"
        )
    whole = hashed(manifest)
    for name, record in manifest.files.items():
        verify(path / name, record, content=name in whole)
    return manifest


def seems_whole(path: Path) -> bool:
    """Return whether the files of a checkpoint are there in full length, without reading what they hold."""
    try:
        verified(path, lambda _: ())
    except CheckpointError:
        return False
    return True
