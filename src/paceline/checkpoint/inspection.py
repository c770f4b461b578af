"""What a checkpoint holds, from its manifest alone; torch is imported only where every byte is to be verified."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint.best import Scored, best_of
from paceline.checkpoint.durable import verify
from paceline.checkpoint.file_record import FileRecord
from paceline.checkpoint.manifest import COMMITTED, EXTRA_STATE, MANIFEST, Manifest, newest_readable
from paceline.checkpoint.stored import Stored
from paceline.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """A checkpoint as it lies on the disk."""

    path: Path
    manifest: Manifest
    damage: dict[str, str]
    """What is wrong with which file."""
    hashed: bool
    """Whether every byte was read, or only the lengths were looked at."""
    newer: dict[Path, str]
    """Newer checkpoints of the run that have no readable manifest, and why."""
    best: tuple[Scored, ...]
    """The best checkpoints of its run, the best first."""

    @property
    def parts(self) -> dict[str, FileRecord]:
        """The files with tensors."""
        return {name: self.manifest.files[name] for name in self.manifest.parts}

    def tensors(self) -> list[tuple[str, Stored]]:
        """Return all tensors, the largest first."""
        return sorted(self.manifest.tensors.items(), key=lambda item: (-item[1].bytes, item[0]))

    def as_json(self, most: int | None) -> dict[str, Any]:
        """Return it as plain values, with so many tensors."""
        manifest = self.manifest
        return {
            "path": str(self.path),
            "step": manifest.step,
            "position": manifest.position,
            **{key: manifest.meta.get(key) for key in ("strategy", "mesh", "workers", "shards", "exactness")},
            "meta": manifest.meta,
            "weights_sha256": manifest.weights_sha256,
            "files": {
                name: {**record._asdict(), "damage": self.damage.get(name)}
                for name, record in manifest.files.items()
            },
            "whole": not self.damage,
            "best": [{"step": one.step, "path": str(one.path), **asdict(one.score)} for one in self.best],
            "passed_over": {str(path): reason for path, reason in self.newer.items()},
            "verified": self.hashed,
            "bytes": sum(record.size for record in manifest.files.values()),
            "parameters": sum(tensor.values for tensor in manifest.model.values()),
            "tensor_count": len(manifest.tensors),
            "aliases": manifest.aliases,
            "tensors": {
                key: {
                    "shape": list(tensor.shape),
                    "dtype": tensor.dtype,
                    "bytes": tensor.bytes,
                    "parts": sorted({bounds.part for bounds in tensor.chunks}),
                }
                for key, tensor in self.tensors()[:most]
            },
        }


def inspect(place: Path, *, verify_all: bool = False) -> Inspection:
    """Look at a checkpoint, or at the newest one of a run."""
    if not place.is_dir():
        raise CheckpointError(f"there is no folder {place}. Give the folder of a run, or of a checkpoint.")
    newer: dict[Path, str] = {}
    if (place / MANIFEST).exists() or re.fullmatch(COMMITTED, place.name):
        path, manifest = place, _manifest(place)
    else:
        path, manifest, newer = newest_readable(place, Manifest.read)
    damage: dict[str, str] = {}
    for name, record in manifest.files.items():
        try:
            verify(path / name, record, content=verify_all)
        except CheckpointError as error:
            damage[name] = str(error)
    if verify_all and not damage:
        damage = _misfits(path, manifest)
    run = path.parent if path.parent.name == "checkpoints" else place
    best = tuple(best_of(run))
    return Inspection(path=path, manifest=manifest, damage=damage, hashed=verify_all, newer=newer, best=best)


def _misfits(path: Path, manifest: Manifest) -> dict[str, str]:
    """Return which files are the ones that were recorded, and yet hold something else than the manifest says."""
    # Only where every byte is read anyway: loading torch takes a second.
    from paceline.checkpoint.extra_state import read_extra_state
    from paceline.checkpoint.parts import StoredTensors

    found: dict[str, str] = {}
    try:
        read_extra_state(path)
    except CheckpointError as error:
        found[EXTRA_STATE] = str(error)
    try:
        with StoredTensors(path, manifest) as parts:
            parts.check()
    except CheckpointError as error:
        found[next((name for name in manifest.parts if str(error).startswith(name)), MANIFEST)] = str(error)
    return found


def verdict(found: Inspection) -> str | None:
    """Return in one line what is wrong with a checkpoint, or with a newer one of its run, if something is."""
    if not found.damage:
        return next((_unusable(path, reason) for path, reason in found.newer.items()), None)
    needed, has = (
        len(found.parts),
        len(found.parts) - sum("missing" in found.damage.get(name, "") for name in found.parts),
    )
    count = f"it needs {needed} part{'s'[: needed > 1]} and has {has}: " if has < needed else ""
    return f"{found.path} is damaged: {count}{'; '.join(found.damage.values())}. Use an earlier checkpoint."


def _manifest(path: Path) -> Manifest:
    try:
        return Manifest.read(path)
    except CheckpointError as error:
        raise CheckpointError(_unusable(path, str(error))) from error


def _unusable(path: Path, reason: str) -> str:
    return f"{path} cannot be used: {reason}. Use an earlier checkpoint."
