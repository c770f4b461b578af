"""A process beside the run in which its sinks of metrics are: what they do, or fail to, is no part of the training.

They may wait for a network, draw random numbers and fill a disk. The run writes events to a pipe and never waits; a sink that
fails costs a note.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from paceline.observe import sink_catalogue
from paceline.observe.events import Event, from_json, to_json
from paceline.observe.sinks import Sink
from paceline.world import env

WAITING = 1 << 22
"""Bytes of events that are kept for sinks that do not keep up."""
PATIENCE_S = 30.0
"""How long they may take at the end of a run."""
LOOK_S = 0.5


class SinkProcess:
    """Sends events to the process; `note` tells the user something in a line."""

    def __init__(self, names: Sequence[str], folder: Path | None, note: Callable[[str], None]) -> None:
        self._note, self._names = note, ", ".join(names)
        self._waiting = bytearray()
        self._dropped = 0
        self._looked = time.monotonic()
        self._heard = b""
        self._ended = False
        log = subprocess.DEVNULL if folder is None else _log(folder)
        path = os.pathsep.join(dict.fromkeys([*filter(None, sys.path), str(Path.cwd())]))
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, "" if folder is None else str(folder), *names],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**env.snapshot(), "PYTHONPATH": path},
                start_new_session=True,  # Ctrl-C is for the run, which ends it
            )
        finally:
            if log != subprocess.DEVNULL:
                os.close(log)
        for pipe in (self._process.stdin, self._process.stdout):
            os.set_blocking(pipe.fileno(), False)  # type: ignore[union-attr]

    def emit(self, event: Event) -> None:
        """Take one event."""
        if self._ended:
            return
        if len(self._waiting) > WAITING:
            self._dropped += 1
        else:
            self._waiting += to_json(event).encode(errors="backslashreplace") + b"\n"
        self._send()
        if time.monotonic() - self._looked >= LOOK_S:
            self._hear()

    def close(self) -> None:
        """Wait a while for the sinks to write what is left."""
        if self._ended:
            return
        until = time.monotonic() + PATIENCE_S
        while self._waiting and not self._ended and (left := until - time.monotonic()) > 0:
            select.select([], [self._in], [], min(left, LOOK_S))
            self._send()
        if self._ended:
            return
        self._ended = True
        self._process.stdin.close()  # type: ignore[union-attr]
        if not self._has_ended(max(0.0, until - time.monotonic())):
            self._kill()
            self._note(f"--sink {self._names}: not done {PATIENCE_S:g} s after the run, and left unfinished")
        self._process.wait()
        self._hear()
        self._process.stdout.close()  # type: ignore[union-attr]
        if self._dropped:
            self._note(f"--sink {self._names}: did not keep up, {self._dropped} events are not there")

    @property
    def _in(self) -> int:
        return self._process.stdin.fileno()  # type: ignore[union-attr]

    def _send(self) -> None:
        try:
            while self._waiting:
                del self._waiting[: os.write(self._in, self._waiting)]
        except BlockingIOError:
            return
        except OSError:
            self._waiting.clear()
            self._ended = True
            self._process.stdin.close()  # type: ignore[union-attr]
            self._kill()  # it reads no more, and may be there still
            self._process.wait()
            self._hear()
            self._process.stdout.close()  # type: ignore[union-attr]
            self._note(f"--sink {self._names}: their process has ended, and the run goes on without them")

    def _has_ended(self, patience: float) -> bool:
        """Wait for the process to end, which keeps its number until it is waited for."""
        watched = os.pidfd_open(self._process.pid)
        try:
            return bool(select.select([watched], [], [], patience)[0])
        finally:
            os.close(watched)

    def _kill(self) -> None:
        """Kill the process and those that it has started; it leads a group of its own."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _hear(self) -> None:
        """Pass on what the sinks have to say."""
        self._looked = time.monotonic()
        with suppress(BlockingIOError):
            while chunk := os.read(self._process.stdout.fileno(), 1 << 16):  # type: ignore[union-attr]
                self._heard += chunk
        *lines, self._heard = self._heard.split(b"\n")
        for line in lines:
            self._note(line.decode(errors="replace"))


def _log(folder: Path) -> int:
    """Open the file for what packages print."""
    place = folder / "logs" / "sinks.log"
    place.parent.mkdir(parents=True, exist_ok=True)
    return os.open(place, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


class Guarded:
    """A sink that ends with its first error, in a note."""

    def __init__(self, name: str, folder: Path | None, notes: TextIO) -> None:
        self._name, self._notes = name, notes
        self._sink: Sink | None = None
        self._guard(lambda: setattr(self, "_sink", sink_catalogue.opened(name, folder)))

    def emit(self, event: Event) -> None:
        """Hand it an event."""
        if (sink := self._sink) is not None:
            self._guard(lambda: sink.emit(event))

    def close(self) -> None:
        """Close it."""
        if (sink := self._sink) is not None:
            self._guard(sink.close)
            self._sink = None

    def _guard(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001  (whatever a package or a user's class raises)
            self._sink = None
            reason = next(iter(str(error).splitlines()), "")
            words = f"{type(error).__name__}: {reason}" if reason else type(error).__name__
            self._notes.write(f"--sink {self._name} failed, and the run goes on without it: {words}\n")
            self._notes.flush()


def _end_after(run: int) -> None:
    """End this process, and those it has started, some time after the run's: a sink may hang, and nobody is left to kill it."""
    try:
        watched = os.pidfd_open(run)
    except ProcessLookupError:  # it has ended: so has what comes on standard input
        return
    select.select([watched], [], [])
    time.sleep(PATIENCE_S)
    os.killpg(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Hand events that come on standard input to the sinks that are named."""
    threading.Thread(target=_end_after, args=(os.getppid(),), daemon=True).start()
    folder, *names = sys.argv[1:]
    notes = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="backslashreplace")
    os.dup2(2, 1)  # what packages print is no note
    sinks = [Guarded(name, Path(folder) if folder else None, notes) for name in names]
    for line in sys.stdin:
        event = from_json(line)
        for sink in sinks:
            sink.emit(event)
    for sink in sinks:
        sink.close()


if __name__ == "__main__":
    main()
