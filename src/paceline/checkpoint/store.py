"""The checkpoints of a run: each is committed whole by one rename, and the newest whole one is found.

checkpoints/
  step-100/ part-0.safetensors  part-1.safetensors  extra_state.pt  manifest.json
  step-0100/                   the old step-100, while the new one is renamed into its place
  .step-200.partial-...        being written, and .step-50.removed-... being deleted: see leftovers.py
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint.background import Background
from paceline.checkpoint.best import Score, Scores, score_of
from paceline.checkpoint.compare import same
from paceline.checkpoint.contents import Contents
from paceline.checkpoint.durable import remove, sync
from paceline.checkpoint.extra_state import read_extra_state
from paceline.checkpoint.file_record import FileRecord
from paceline.checkpoint.leftovers import beside, discard, holds_others_files, sweep
from paceline.checkpoint.manifest import COMMITTED, Manifest, committed
from paceline.checkpoint.parts import StoredTensors
from paceline.checkpoint.pending_checkpoint import PendingCheckpoint
from paceline.checkpoint.read import seems_whole, verified
from paceline.errors import CheckpointError, DiskFaultError, InputError
from paceline.state.chunks import ChunkBounds
from paceline.world import World, all_gather_object, broadcast_object

# What a rename says whose target is a folder with something in it, or a file.
_OCCUPIED = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)


@dataclass(frozen=True)
class Found:
    """A whole checkpoint, of which nothing but the extra state has been read."""

    path: Path
    manifest: Manifest
    extra_state: dict[str, Any]

    def open(self) -> StoredTensors:
        """Open its parts, to be read chunk by chunk."""
        return StoredTensors(self.path, self.manifest)


_LARGE = 16 << 20
"""From how many bytes on the weights are hashed beside the writing."""


class Checkpoints:
    """The `checkpoints/` folder of one run; any number read, and a second writer of the same run does no harm."""

    def __init__(self, folder: Path, *, keep: int = 3, keep_best: int = 1) -> None:
        for name, count in (("keep", keep), ("keep_best", keep_best)):
            if count < 1:
                raise InputError(f"{name}={count} would keep no checkpoint. Use 1 or more.")
        self.folder = folder
        self.keep, self.keep_best = keep, keep_best
        self._scores = Scores(folder)
        self.own: set[int] = set()
        """The steps that this run saved itself, or was resumed from: saved once more, they are replaced."""

    def committed(self) -> list[Path]:
        """Return the folders of all committed checkpoints, the oldest step first, whole or damaged."""
        return committed(self.folder)

    def pending(self, step: int) -> PendingCheckpoint:
        """Name the folders of a step that this process will commit."""
        final = self.folder / f"step-{step}"
        return PendingCheckpoint(final, beside(final, "partial"), replaces=step in self.own)

    def open(self, pending: PendingCheckpoint) -> None:
        """Make the folder that the parts are written into."""
        pending.make()
        # What the dead left may be what fills the disk. What of it cannot be deleted is told after the commit.
        with suppress(OSError):
            sweep(self.folder, COMMITTED, now=pending.partial.stat().st_mtime, writing=pending.partial)

    def write_alone(self, pending: PendingCheckpoint, contents: Contents) -> str:
        """Write and commit a state that this process holds all of; return the fingerprint of the weights."""
        try:
            return self._write_once(pending, contents)
        except Exception:
            if pending.partial.exists() or pending.final.exists():
                raise
            # Somebody removed the folder while we wrote into it: once more, into a new one.
            return self._write_once(pending, contents)

    def _write_once(self, pending: PendingCheckpoint, contents: Contents) -> str:
        self.open(pending)
        beside = contents.is_whole and contents.nbytes > _LARGE
        early = Background(lambda _: contents.fingerprint_in_memory()) if beside else None
        try:
            record = pending.write_part(0, contents.tensors)
            sync(pending.part(0))
            files = pending.complete({0: record}, contents.extra_state)
        finally:
            if early is not None:
                early.wait()  # it reads what the training writes to
        weights = contents.fingerprint(pending.partial) if early is None else early.result()
        self.commit(pending, contents.manifest(files, weights))
        return weights

    def commit(self, pending: PendingCheckpoint, manifest: Manifest) -> None:
        """Write the manifest of a checkpoint whose files are all there, and give it its name."""
        manifest.write(pending.partial)
        pending.remove_markers()
        sync(pending.partial)
        aside: Path | None = None
        while True:
            try:
                pending.partial.rename(pending.final)
                break
            except OSError as error:
                if error.errno not in _OCCUPIED:
                    if aside is not None:
                        with suppress(OSError):
                            aside.rename(pending.final)
                    raise
            if _holds_same(pending.final, pending.partial, manifest, replaces=pending.replaces):
                # Another writer of the same run was faster, a machine that was cut off say.
                remove(pending.partial)
                break
            aside = _make_way(pending.final)
        sync(self.folder)

    def admits(self, step: int, score: Score) -> bool:
        """Return whether a checkpoint with this score would be among the best ones that are kept."""
        return self._scores.admits(step, score, self.keep_best)

    def prune(self, just_written: Path, note: Callable[[str], None]) -> None:
        """Delete what is older than the last `keep` whole ones, except the best; the damaged ones above them do not count.

        What somebody else has put into the folder of one stays. What cannot be deleted goes to `note` as one line.
        """
        whole: set[int] = set()
        try:
            spared = {just_written, *(one.path for one in self._scores.best(self.keep_best, seems_whole))}
            for path in reversed(self.committed()):
                step = _step(path)
                if len(whole) >= self.keep or step in whole:
                    if path not in spared:
                        discard(path)
                elif path == just_written or seems_whole(path):
                    whole.add(step)
            sweep(self.folder, COMMITTED, now=just_written.stat().st_mtime)
        except FileNotFoundError:
            return  # Somebody removed the folder, and so nothing is left to delete.
        except OSError as error:
            note(
                f"{just_written} is safe, but what is left of an old one beside it could not be deleted "
                f"({error.strerror}: {error.filename}). Delete it by hand."
            )


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
        manifest = verified(path, lambda one: _dealt(one.files, world.rank, world.size))
        return Found(path, manifest, read_extra_state(path)), ""
    except CheckpointError as error:
        return None, str(error)


def _dealt(files: Mapping[str, FileRecord], rank: int, size: int) -> set[str]:
    """Return the files that one of so many workers is to hash: each goes to one, the largest first to whom has least."""
    loads = [0] * size
    mine = set()
    for name in sorted(files, key=lambda name: (-files[name].size, name)):
        least = loads.index(min(loads))
        loads[least] += files[name].size
        mine |= {name} if least == rank else set()
    return mine


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _make_way(final: Path) -> Path | None:
    """Free the name of a checkpoint that is to be replaced, or raise; return where it lies now, if it was whole.

    Whoever dies before the new one has the name must leave the old one to every reader, on every disk: what is whole keeps a
    name that they know it by, and `prune` deletes it there.
    """
    if not os.path.lexists(final):
        return None  # Another writer has moved it.
    if final.is_symlink() or not final.is_dir():
        raise _occupied(final, "is no folder but a link or a file", "it")
    if holds_others_files(final):
        raise _occupied(final, "holds files that are none of a checkpoint", "them")
    if not seems_whole(final):
        discard(final)
        return None
    aside = _free_name(final)
    try:
        final.rename(aside)
    except OSError as error:
        # Another writer has moved it, or has just taken the other name.
        if error.errno not in (errno.ENOENT, *_OCCUPIED):
            raise
        return None
    return aside


def _occupied(final: Path, how: str, what: str) -> DiskFaultError:
    return DiskFaultError(
        f"cannot save {final}: it is there already and {how}. Move {what} away, or choose another folder."
    )


def _free_name(final: Path) -> Path:
    """Return another name for a step: all who look for checkpoints read step-0100 as step 100, and prefer step-100 to it."""
    zeros = 1
    while os.path.lexists(aside := final.with_name(f"step-{'0' * zeros}{_step(final)}")):
        zeros += 1
    return aside


def _holds_same(final: Path, partial: Path, manifest: Manifest, *, replaces: bool) -> bool:
    """Return whether a committed checkpoint holds what has just been written; False if it is damaged.

    Raise where it holds another state, unless what was written `replaces` it.
    """
    try:
        existing = verified(final)
        with StoredTensors(final, existing) as there, StoredTensors(partial, manifest) as here:
            equal = (
                existing.position == manifest.position
                # One that was scored stays so; one that was not gets its score.
                and score_of(manifest) in (None, score_of(existing))
                and there.catalogue == here.catalogue
                and same(read_extra_state(final), read_extra_state(partial))
                and all(
                    same(
                        there.read(key, ChunkBounds.whole(meta.shape)),
                        here.read(key, ChunkBounds.whole(meta.shape)),
                    )
                    for key, meta in here.catalogue.items()
                )
            )
    except CheckpointError:
        # Damaged: a run that resumed from an earlier step has come here again and puts it right.
        return False
    if not equal and not replaces:
        raise CheckpointError(
            f"{final} is there already and holds another state. Resume that run, or choose another folder."
        )
    return equal
