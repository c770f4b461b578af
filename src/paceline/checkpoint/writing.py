"""What one worker does of a save once all know who writes what: its part, and on the first one the commit."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.checkpoint.background import Background
from paceline.checkpoint.contents import Contents
from paceline.checkpoint.durable import committing, disk_fault, sync
from paceline.checkpoint.file_record import FileRecord
from paceline.checkpoint.pending_checkpoint import Fault, PendingCheckpoint
from paceline.checkpoint.staging import Staging
from paceline.checkpoint.store import Checkpoints
from paceline.errors import CheckpointError
from paceline.world.interruption import Interruption

LOOK_S = 0.02
"""How often the first worker's thread looks for the done-markers of the others."""


class SaveAbortedError(Exception):
    """The group changed before all parts of a checkpoint were there."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint that is committed."""

    step: int
    path: Path
    weights_sha256: str
    seconds: float
    notes: tuple[str, ...]
    """What else the user should know."""


@dataclass(frozen=True)
class PartWriting:
    """One worker's part that is written, or is not."""

    final: Path
    fault: Fault
    _path: Path | None = None
    """None where this worker has no part, or it was not written."""
    _written: FileRecord | None = None

    def record(self) -> tuple[FileRecord | None, Fault]:
        """Bring it to the disk; return what the file is, or why it is not there."""
        if self._path is None:
            return None, self.fault
        try:
            sync(self._path)
        except Exception as error:  # noqa: BLE001  (raised again unless it is a fault of the save)
            return None, fault_of(error, self.final)
        return self._written, Fault()


def fault_of(error: Exception, final: Path) -> Fault:
    """Make a fault of an error that is about the checkpoint or the disk; raise any other."""
    if isinstance(error, CheckpointError):
        return Fault.of(error)
    message = disk_fault(error, final)
    if message is None:
        raise error
    return Fault(message, disk=True)


@dataclass(frozen=True, kw_only=True)
class Writing:
    """One worker's work on one checkpoint."""

    checkpoints: Checkpoints
    pending: PendingCheckpoint
    part: int | None
    """The number of the part that this worker writes, if it writes one."""
    contents: Contents
    started: float

    @property
    def alone(self) -> bool:
        """Whether the first worker writes everything."""
        return self.contents.plan.writers == (0,)

    def copied(self, staging: Staging) -> Writing:
        """Return the same with copies of all tensors, which can be written while training continues."""
        contents = self.contents
        copies = staging.copies(contents.tensors)
        return replace(
            self, contents=replace(contents, tensors=copies, extra_state=copy.deepcopy(contents.extra_state))
        )

    def begin_part(self) -> PartWriting:
        """Write this worker's part, if it has one; the disk may not hold it yet."""
        final = self.pending.final
        if self.part is None:
            return PartWriting(final, Fault())
        try:
            written = self.pending.write_part(self.part, self.contents.tensors)
        except Exception as error:  # noqa: BLE001  (raised again unless it is a fault of the save)
            return PartWriting(final, fault_of(error, final))
        return PartWriting(final, Fault(), self.pending.part(self.part), written)

    def write_part_and_mark(self) -> None:
        """Write this worker's part, if it has one, and leave word of it in the folder."""
        if self.part is None:
            return
        try:
            record, fault = self.begin_part().record()
        except Exception as error:
            self.pending.mark_done(
                self.part, None, Fault(f"part {self.part} of {self.pending.final}: {error!r}")
            )
            raise
        self.pending.mark_done(self.part, record, fault)

    # On the worker that commits.

    def commit_alone(self) -> Saved:
        """Write everything and commit it."""
        with committing(self.pending.partial, self.pending.final):
            weights = self.checkpoints.write_alone(self.pending, self.contents)
        return self._saved(weights)

    def fingerprint(self) -> str:
        """Return that of the weights, once all parts are written."""
        return self.contents.fingerprint(self.pending.partial)

    def commit(self, records: Mapping[int, FileRecord], fingerprint: Callable[[], str]) -> Saved:
        """Commit when all parts are on the disk; `fingerprint` gives that of the weights, or raises what went wrong."""
        with committing(self.pending.partial, self.pending.final):
            files = self.pending.complete(records, self.contents.extra_state)
            weights = fingerprint()
            self.checkpoints.commit(self.pending, self.contents.manifest(files, weights))
        return self._saved(weights)

    def commit_when_done(self, job: Background[Saved | None], broken: Interruption) -> Saved:
        """Write this worker's part, wait for the done-markers of all others, commit."""
        if self.alone:
            return self.commit_alone()
        with committing(self.pending.partial, self.pending.final):
            self.write_part_and_mark()
            while True:
                # Asked before the markers are: what was done when the group broke counts.
                given_up = job.given_up or broken.raised
                done = self.pending.done_parts()
                if len(done) == len(self.contents.plan.writers):
                    return self.commit(done, self.fingerprint)
                if given_up:
                    raise SaveAbortedError(
                        f"the checkpoint of step {self.contents.metadata.step} was given up: the group changed while it "
                        "was written. The next one is written when it is due."
                    )
                time.sleep(LOOK_S)

    def _saved(self, weights: str) -> Saved:
        notes: list[str] = []
        self.checkpoints.prune(self.pending.final, notes.append)
        return Saved(
            step=self.contents.metadata.step,
            path=self.pending.final,
            weights_sha256=weights,
            seconds=time.perf_counter() - self.started,
            notes=tuple(notes),
        )
