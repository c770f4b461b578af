"""Where events go: a file, a pipe to the launcher, or several places at once.

A sink runs inside the training step, so it only notes a step's event and writes when there is time.
"""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from paceline.observe.events import Event, Logged, StepFinished, to_json

UNWRITTEN = 1 << 20
"""Bytes of events that are kept for a disk that does not take them."""


class Sink(Protocol):
    """Takes events until it is closed; closing twice is fine."""

    def emit(self, event: Event) -> None:
        """Take one event."""

    def close(self) -> None:
        """Write what is left, and release the file or pipe."""


class JsonlSink:
    """Appends every event to a file, one line of JSON each.

    Steps are on disk at the latest with the first event half a second later or with `flush`, everything else at once.
    """

    def __init__(self, path: str | Path, *, every: float = 0.5) -> None:
        self._every = every
        self._lock = threading.Lock()
        self._waiting: list[Event] = []
        self._written = 0.0
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        self._unwritten = b""
        """Lines that the disk did not take."""
        self._said = False
        drop_torn_line(path)

    def emit(self, event: Event) -> None:
        """Take one event; only some calls write."""
        with self._lock:
            self._waiting.append(event)
            if (
                not isinstance(event, StepFinished | Logged)
                or time.monotonic() - self._written >= self._every
            ):
                self._write()

    def flush(self) -> None:
        """Write what is waiting."""
        with self._lock:
            if self._waiting:
                self._write()

    def close(self) -> None:
        """Write what is left and close the file."""
        with self._lock:
            if not self._file.closed:
                self._write()
                self._file.close()

    def _write(self) -> None:
        lines = [to_json(event) + "\n" for event in self._waiting]
        self._waiting.clear()
        self._unwritten += "".join(lines).encode(errors="backslashreplace")
        self._written = time.monotonic()
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            self._keep_for_later(error)

    def _keep_for_later(self, error: OSError) -> None:
        """Keep, up to a bound, what the disk does not take: a run goes on without its events."""
        if len(self._unwritten) > UNWRITTEN:
            end = self._unwritten.find(b"\n", len(self._unwritten) - UNWRITTEN) + 1
            self._unwritten = self._unwritten[end:]
        if not self._said:
            self._said = True
            print(  # noqa: T201
                f"note: {self._file.name} cannot be written ({error.strerror}). The run goes on without its newest events.",
                file=sys.stderr,
            )


class RelaySink:
    """Sends events to the launcher through a pipe, without ever waiting for it while training.

    Steps are thinned to one in `every` seconds; the newest one held back goes out before any other event, so
    the reader always knows the true step. What the pipe cannot take yet is kept, and offered again later.
    """

    def __init__(self, fd: int, *, every: float = 0.1, patience: float = 2.0) -> None:
        self._fd = fd
        self._every = every
        self._patience = patience
        self._lock = threading.Lock()
        self._held: StepFinished | None = None
        self._logged: Logged | None = None
        """What was reported since the last step that was sent: the newest value of each name."""
        self._waiting = bytearray()
        self._sent = float("-inf")
        self._open = True
        os.set_blocking(fd, False)

    def emit(self, event: Event) -> None:
        """Take one event."""
        with self._lock:
            if type(event) is Logged:
                before = {} if self._logged is None else self._logged.values
                self._logged = replace(event, values={**before, **event.values})
                return
            if type(event) is StepFinished:
                now = time.monotonic()
                if now - self._sent < self._every:
                    self._held = event
                    return
                self._sent = now
                self._send()
                if self._waiting:
                    self._held = event
                    return
                self._held = None
            else:
                self._queue_held()
            self._queue_logged()
            self._waiting += to_json(event).encode() + b"\n"
            self._send()

    def close(self) -> None:
        """Wait a moment for the launcher to take what is left, then close the pipe."""
        with self._lock:
            if not self._open:
                return
            self._queue_held()
            self._send()
            deadline = time.monotonic() + self._patience
            while self._waiting and (left := deadline - time.monotonic()) > 0:
                select.select([], [self._fd], [], left)
                self._send()
            self._open = False
            os.close(self._fd)

    def _queue_logged(self) -> None:
        if self._logged is not None:
            self._waiting += to_json(self._logged).encode() + b"\n"
            self._logged = None

    def _queue_held(self) -> None:
        self._queue_logged()
        if self._held is not None:
            self._waiting += to_json(self._held).encode() + b"\n"
            self._held = None

    def _send(self) -> None:
        try:
            while self._open and self._waiting:
                del self._waiting[: os.write(self._fd, self._waiting)]
        except BlockingIOError:
            return
        except BrokenPipeError:
            # The launcher is gone and nobody reads; what becomes of this worker is decided elsewhere.
            self._waiting.clear()


class Fanout:
    """Hands each event to several sinks, in order."""

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self._sinks = tuple(sinks)

    def emit(self, event: Event) -> None:
        """Take one event."""
        for sink in self._sinks:
            sink.emit(event)

    def close(self) -> None:
        """Close every sink, also where one of them fails to; from then on none is told anything."""
        sinks, self._sinks = self._sinks, ()
        with ExitStack() as stack:
            for sink in reversed(sinks):
                stack.callback(sink.close)


def drop_torn_line(path: Path) -> None:
    """Cut off half a line that a machine which lost power has left: appending to it would spoil the next one too."""
    with path.open("rb+") as file:
        size = end = file.seek(0, os.SEEK_END)
        step = 1 << 16
        while end > 0:
            start = max(0, end - step)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:  # else leave it alone: the launcher may be adding a line just now
            file.truncate(end)
