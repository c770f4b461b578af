"""All workers find the newest whole checkpoint together; each hashes its share of the files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint.extra_state import read_extra_state
from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.parts import StoredTensors
from paceline.checkpoint.read import dealt, verified
from paceline.checkpoint.store import Checkpoints
from paceline.errors import CheckpointError
from paceline.world import World, all_gather_object, broadcast_object


@dataclass(frozen=True)
class Found:
    """A whole checkpoint, of which nothing but the rest has been read."""

    path: Path
    manifest: Manifest
    rest: dict[str, Any]

    def open(self) -> StoredTensors:
        """Open its parts, to be read chunk by chunk."""
        return StoredTensors(self.path, self.manifest)


def find_newest(world: World, checkpoints: Checkpoints, report: Callable[[Path, str], None]) -> Found | None:
    """Return the same newest whole checkpoint on every worker; each damaged one above it goes to `report` on the first worker."""
    damaged: set[str] = set()
    while True:
        names = (
            [path.name for path in checkpoints.committed() if path.name not in damaged]
            if world.is_first
            else []
        )
        name: str | None = broadcast_object(world.comm, names[-1] if names else None)
        if name is None:
            return None
        path = checkpoints.folder / name
        found, reason = _verified(path, world)
        told: list[tuple[str, bool]] = all_gather_object(world.comm, (reason, path.is_dir()))
        if found is not None and not any(one for one, _ in told):
            return found
        for rank, (_, seen) in enumerate(told[1:], 1):
            if told[0][1] and not seen:
                hosts: list[str] = all_gather_object(world.comm, world.host)
                raise CheckpointError(
                    f"rank {rank} on {hosts[rank]} does not see {path}. Put --out on a disk that all machines share."
                )
        damaged.add(name)
        if world.is_first and path.is_dir():
            report(path, max(one for one, _ in told))


def _verified(path: Path, world: World) -> tuple[Found | None, str]:
    try:
        manifest = verified(path, lambda one: dealt(one.files, world.rank, world.size))
        return Found(path, manifest, read_extra_state(path)), ""
    except CheckpointError as error:
        return None, str(error)
