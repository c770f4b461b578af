"""Writes the launcher's files from a thread: a slow or full disk costs what is written, never the run.

What the disk does not take is kept, up to a bound, and tried again; beyond that bytes are dropped and counted in their place, and
the user is told once.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from paceline.observe.events import Note, to_json

KEPT = 16 << 20
"""Bytes that may wait for the disk, of all files together."""
RETRY_S = 1.0
FLUSH_S = 5.0
"""How long the end of a launch waits for the disk."""


@dataclass
class _File:
    """What one file is yet to hold."""

    waiting: bytearray = field(default_factory=bytearray)
    dropped: int = 0
    whole: bytes | None = None
    """Contents that replace all others."""
    made: bool = False
    """Whether it is there: a log that nothing was written to is empty, not missing."""

    @property
    def idle(self) -> bool:
        return self.made and not self.waiting and not self.dropped and self.whole is None


class FileWriter:
    """Appends to files and replaces them, in a thread of its own."""

    def __init__(self) -> None:
        self._failed = self._dropped = self._lost = False
        """What the user was told of: that the disk fails, that something was dropped, and that it never came."""
        self._complaints: list[str] = []
        self._changed = threading.Condition()
        self._files: dict[Path, _File] = {}
        self._kept = 0
        self._busy = self._closing = False
        self._retry_at = 0.0
        self._thread = threading.Thread(target=self._work, name="paceline-files", daemon=True)
        self._thread.start()

    def append(self, path: Path, data: bytes) -> None:
        """Add bytes to the end of a file."""
        with self._changed:
            file = self._files.setdefault(path, _File())
            if file.dropped or self._kept + len(data) > KEPT:
                file.dropped += len(data)
                self._complain_of_loss(path)
            else:
                file.waiting += data
                self._kept += len(data)
            self._changed.notify_all()

    def replace(self, path: Path, data: bytes) -> None:
        """Make a file hold these bytes, whole or not at all; the newest of several win."""
        with self._changed:
            self._files.setdefault(path, _File()).whole = data
            self._changed.notify_all()

    def take_complaint(self) -> str | None:
        """Return, once, what to say of a disk that does not take what is written."""
        with self._changed:
            complaints, self._complaints = self._complaints, []
        return " ".join(complaints) or None

    def flush(self, wait_s: float = FLUSH_S) -> bool:
        """Wait until all is written, for a while at most and no longer than the disk takes it; return whether it is."""
        with self._changed:
            self._changed.wait_for(lambda: self._idle or (self._failed and not self._busy), wait_s)
            return self._idle

    def close(self, wait_s: float = FLUSH_S) -> None:
        """Write what is left, in one more attempt, and end the thread."""
        with self._changed:
            self._closing, self._retry_at = True, 0.0
            self._changed.notify_all()
        self._thread.join(wait_s)  # one that hangs in a write is left there
        with self._changed:
            left = [path.name for path, file in self._files.items() if file.waiting or file.dropped]
            lost = self._kept + sum(file.dropped for file in self._files.values())
            if left and not self._lost:
                self._lost = True
                others = f" and {len(left) - 1} other files" if len(left) > 1 else ""
                self._complaints.append(
                    f"{lost} bytes of {left[0]}{others} were lost at the end: the disk did not take them."
                )

    def _complain_of_loss(self, path: Path) -> None:
        if not self._dropped:
            self._dropped = True
            self._complaints.append(
                f"{path.name} has lost what the disk did not take in time; it says how much, and where."
            )

    @property
    def _idle(self) -> bool:
        return not self._busy and all(file.idle for file in self._files.values())

    def _work(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                while not (due := self._due()) and not self._closing:
                    pause = self._retry_at - time.monotonic()
                    self._changed.wait(max(0.01, pause) if self._retry_at else None)
                if not due:
                    return
                self._busy, self._retry_at = True, 0.0
            for path in due:
                self._write(path)
            if self._closing and self._retry_at:
                return  # what the disk does not take now is lost

    def _due(self) -> list[Path]:
        if self._retry_at and time.monotonic() < self._retry_at and not self._closing:
            return []
        return [path for path, file in self._files.items() if not file.idle]

    def _write(self, path: Path) -> None:
        with self._changed:
            file = self._files[path]
            data, file.waiting = bytes(file.waiting), bytearray()
            dropped, file.dropped = file.dropped, 0
            whole, file.whole = file.whole, None
        written, replaces = 0, whole is not None
        error: OSError | None = None
        try:
            if whole is not None:
                _replace(path, whole)
                whole = None
            if data or not replaces:
                written = _append(path, data)
            file.made = True
        except _PartlyWrittenError as failed:
            written, error = failed.written, failed.error
        except OSError as failed:
            error = failed
        with self._changed:
            self._kept -= written
            if error is None:
                mark = _mark(path, dropped) if dropped else b""
                file.waiting[:0] = mark
                self._kept += len(mark)
                return
            file.waiting[:0] = data[written:]
            file.dropped += dropped
            file.whole = file.whole if file.whole is not None else whole
            self._retry_at = time.monotonic() + RETRY_S
            if not self._failed:
                self._failed = True
                self._complaints.append(
                    f"{path} cannot be written ({error.strerror}). The run goes on; what the disk does not take is kept for a "
                    "while, then dropped."
                )


def _mark(path: Path, dropped: int) -> bytes:
    """Return what a file says in the place of bytes that were dropped, in its own format."""
    words = f"{dropped} bytes were dropped here: the disk did not take them"
    return f"{to_json(Note(text=words))}\n".encode() if path.suffix == ".jsonl" else f"\n[{words}]\n".encode()


class _PartlyWrittenError(Exception):
    def __init__(self, written: int, error: OSError) -> None:
        super().__init__(str(error))
        self.written, self.error = written, error


def _append(path: Path, data: bytes) -> int:
    """Add bytes to a file; return how many. Opened each time: what is open can be neither moved nor unmounted."""
    written = 0
    with path.open("ab", buffering=0) as file:
        while written < len(data):
            try:
                written += os.write(file.fileno(), memoryview(data)[written:])
            except OSError as error:
                raise _PartlyWrittenError(written, error) from error
    return written


def _replace(path: Path, data: bytes) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(data)
    partial.replace(path)
