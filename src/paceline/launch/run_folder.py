"""The folder a launch writes into: kept when it holds a run; otherwise what the launch wrote is deleted, file by file."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from paceline.errors import InputError
from paceline.launch.base import Outcome
from paceline.observe.events import Note, RunStarted
from paceline.training import folder
from paceline.transport.runtime_folder import RuntimeFolder


def claim(path: Path) -> int | None:
    """Lock a run folder for as long as what is returned is open; None where this disk has no locks."""
    lock = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if isinstance(error, BlockingIOError):
            raise InputError(folder.BUSY.format(path)) from None
        return None
    return lock


class RunFolder:
    """The user's folder, or a temporary one for the logs of a launch that asked for none.

    A user's folder is this launch's alone while it runs, so a file of these names that was not there before is its own.
    Machines that follow may write into the folder of the one that leads (`shared`), and delete nothing.
    """

    def __init__(self, out: Path | None, record: Mapping[str, Any], *, shared: bool = False) -> None:
        self._shared = shared or out is None
        self._temporary: RuntimeFolder | None = None
        """Of a launch that asked for no folder: it goes with the launch, and at the next one where that was killed."""
        if out is None:
            self._temporary = RuntimeFolder()
            out = self._temporary.path
        self.path = out
        self._record = record
        self._made: list[Path] = []
        """The folders that were made here, the innermost first."""
        self._found: set[Path] | None = None
        """What lay there before, folders and files; None as long as the folder may be another launch's too."""
        self._spec_before: bytes | None = None
        self._lock: int | None = None
        self._keep = self._temporary is None

    def __enter__(self) -> RunFolder:
        try:
            self._make()
            self._lock = None if self._shared else claim(self.path)
            if self._lock is not None:
                self._found = {place for name in folder.FILES if (place := self.path / name).exists()}
                self._found |= self._written()
            (self.path / "logs").mkdir(exist_ok=True)
            if self._temporary is None:
                spec = self.path / folder.SPEC
                self._spec_before = spec.read_bytes() if spec.exists() else None
                folder.write_spec(self.path, self._record)
        except BaseException as error:
            self._take_away()
            self._release()
            if not isinstance(error, OSError):
                raise
            raise InputError(
                f"the run folder {self.path} cannot be written: {error.strerror}. Choose another --out."
            ) from error
        return self

    def _make(self) -> None:
        """Make the folder and those above it, and note which were really made here."""
        missing = [one for one in (self.path, *self.path.parents) if not one.exists()]
        for place in reversed(missing):
            try:
                place.mkdir()
            except FileExistsError:  # somebody else was faster, so it is theirs
                continue
            self._made.insert(0, place)
        if not self.path.is_dir():
            raise NotADirectoryError(None, "Not a directory")

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def finish(self, outcome: Outcome) -> None:
        """Decide what stays: a run that was never begun leaves nothing, a failed one its logs."""
        failure, spec = outcome.failure, self.path / folder.SPEC
        if self._temporary is None and not spec.exists() and folder.has_run(self.path):
            # Somebody has cleared up in a run that can be gone on with.
            self._try(lambda: folder.write_spec(self.path, self._record))
        if failure is not None and failure.kind == "input":
            begun = failure.step is not None and failure.step > 0
            self._keep = self._temporary is None and (begun or folder.has_run(self.path))
            before = self._spec_before
            # What was refused must not speak for the run that is there.
            if before is not None and self.path.exists():
                self._try(lambda: folder.replace_spec(self.path, before))
        elif failure is None and outcome.interrupted and not outcome.at_once and self._nothing_done():
            self._keep = False
            print(f"no step was finished, so nothing of this run is kept in {self.path}", file=sys.stderr)  # noqa: T201
        elif failure is not None and outcome.interrupted is None and self._temporary is not None:
            print(self._move_logs(), file=sys.stderr)  # noqa: T201

    def _try(self, write: Callable[[], None]) -> None:
        """Write the spec at the end of a run, whose result no full disk must cost."""
        try:
            write()
        except OSError as error:
            print(  # noqa: T201
                f"{self.path / folder.SPEC} cannot be written ({error.strerror}), so --resume may not know how the run was "
                "started: give it the same options.",
                file=sys.stderr,
            )

    def _move_logs(self) -> str:
        """Move the logs out of a temporary folder, and return a line about it: no full disk must hide why the run failed."""
        try:
            kept = Path(tempfile.mkdtemp(prefix="paceline-"))
        except OSError as error:
            return f"the output of every rank is lost: no folder can be made for it ({error.strerror})"
        try:
            shutil.move(self.path / "logs", kept / "logs")
        except OSError as error:  # shutil's own have several causes, and no strerror
            shutil.rmtree(kept, ignore_errors=True)
            return (
                f"the output of every rank is lost: it cannot be moved to {kept} ({error.strerror or error})"
            )
        return f"the output of every rank is in {kept / 'logs'}"

    def _nothing_done(self) -> bool:
        """Return whether a run in the user's folder has begun and got no further: nobody could go on with it."""
        if self._temporary is not None or self._found is None or folder.has_run(self.path):
            return False
        events = self.path / folder.EVENTS
        if not events.exists() or events in self._found:
            return False
        try:
            kinds = {json.loads(line)["kind"] for line in events.read_text().splitlines()}
        except (ValueError, LookupError, TypeError):  # torn: whatever it was, something was done
            return False
        return kinds <= {RunStarted.kind, Note.kind}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        gone = self._temporary is None and not (self.path / folder.SPEC).exists()
        if self._temporary is not None or not self._keep:
            self._take_away()
        self._release()
        if gone and isinstance(error, FileNotFoundError):
            raise folder.vanished(self.path) from error

    def _take_away(self) -> None:
        """Delete what this launch wrote, and the folders that it made as far as they are empty then."""
        if self._temporary is not None:
            self._temporary.close()
            return
        emptied = list(self._made)
        if self._found is not None:
            emptied[:0] = {self.path / name for name in folder.FILES} - self._found - {self.path}
            with suppress(OSError):
                for path in self._written() - self._found:
                    path.unlink(missing_ok=True)
        for place in emptied:
            with suppress(OSError):  # never one that holds anything
                place.rmdir()

    def _written(self) -> set[Path]:
        """Return the files of a launch that are there."""
        return {
            path
            for name, patterns in folder.FILES.items()
            for pattern in patterns
            for path in (self.path / name).glob(pattern)
            if not path.is_dir()
        }
