"""What a launch shows: rank 0's own output, and the events of the run as they come."""

from __future__ import annotations

import codecs
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TextIO

from paceline.launch.background_output import PIECE, BackgroundOutput
from paceline.observe.events import (
    CheckpointDamaged,
    Event,
    Logged,
    Note,
    RunFinished,
    StepFinished,
    WorkerLost,
    from_json,
)
from paceline.observe.pace import Pace
from paceline.observe.progress import Progress
from paceline.observe.sentences import describe


class Console:
    """Forwards rank 0's output to this process's, and events to a progress sink when there is one."""

    def __init__(self, progress: Progress | None = None, *, notes: bool = False) -> None:
        """`notes` shows warnings to the user also where no progress is shown."""
        self._progress = progress
        self._warnings = (Note, CheckpointDamaged) if notes else ()
        self._rest: dict[int, bytes] = {}
        # A chunk may end in the middle of a character.
        self._decoders = {
            name: codecs.getincrementaldecoder("utf-8")(errors="replace") for name in ("out", "err")
        }
        self._background: BackgroundOutput | None = None
        self._broken: BrokenPipeError | None = None
        self.wake: int | None = None
        """Becomes readable when `check` has something to raise; only while output is shown in the background."""
        self._told = False
        """Whether it was printed, or raised, that standard output cannot be written."""
        self.result: dict[str, Any] | None = None

    def open(self) -> None:
        """Show what comes from now on in the background, until `close`: whoever reads it may pause."""
        self._background = BackgroundOutput(self._say_dropped)
        self.wake = os.eventfd(0, os.EFD_NONBLOCK)

    def check(self) -> None:
        """Raise, once, that the reader of standard output or error went away."""
        error, self._broken = self._broken, None
        if error is not None:
            raise error

    def output(self, stream: str, chunk: bytes) -> None:
        """Show bytes that rank 0 wrote to its standard output ("out") or error ("err")."""
        self._write(stream, self._decoders[stream].decode(chunk))

    def line(self, text: str) -> None:
        """Show a line of the launcher's own on standard error."""
        self._write("err", f"{text}\n")

    def _write(self, stream: str, text: str) -> None:
        target = sys.stdout if stream == "out" else sys.stderr
        for piece in _pieces(text, target):
            self._show(stream, partial(self._put, stream, piece), piece.count("\n"), len(piece))

    def _put(self, stream: str, text: str) -> None:
        if self._progress is not None:
            self._progress.print(text, error=stream == "err")
            return
        target = sys.stdout if stream == "out" else sys.stderr
        target.write(text)
        target.flush()

    def events(self, chunk: bytes, source: int = 0) -> None:
        """Take bytes of JSON lines, one event each; `source` tells apart who sends them."""
        *lines, self._rest[source] = (self._rest.get(source, b"") + chunk).split(b"\n")
        for line in lines:
            self.event(from_json(line.decode()))

    def event(self, event: Event) -> None:
        """Show one event."""
        if isinstance(event, RunFinished):
            self.result = event.result
        if self._progress is not None:
            lines = 0 if isinstance(event, StepFinished | Logged) else 1
            self._show("err", partial(self._progress.emit, event), lines)
        elif (isinstance(event, WorkerLost) and event.trace) or isinstance(event, self._warnings):
            self.line(str(describe(event, Pace())))

    def close(self) -> None:
        """Show what waits, for a while at most, and take the progress line away."""
        if self._background is not None and self.wake is not None:
            dropped = self._background.close()
            os.close(self.wake)
            self._background = self.wake = None
            if dropped:
                return  # nobody reads: what is written now would wait for ever
        with self._surviving("err"):
            if self._progress is not None:
                self._progress.close()

    def _show(self, stream: str, action: Callable[[], None], lines: int, characters: int = 100) -> None:
        """Show something: in the background while that is open, here and now otherwise."""
        background = self._background
        if background is None:
            with self._surviving(stream):
                action()
            return
        self.check()

        def show() -> None:
            if background.wait_for_room(sys.stdout if stream == "out" else sys.stderr):
                try:
                    with self._surviving(stream):
                        action()
                except BrokenPipeError as error:
                    self._broken = error
                    if self.wake is not None:
                        os.eventfd_write(self.wake, 1)

        background.put(show, lines, characters)

    def _say_dropped(self, lines: int) -> None:
        if lines and self._background is not None and self._background.wait_for_room(sys.stderr):
            text = f"note: {lines} lines of output were dropped: whoever reads them did not keep up. The logs have them.\n"
            with suppress(BrokenPipeError), self._surviving("err"):
                self._put("err", text)

    @contextmanager
    def _surviving(self, stream: str) -> Iterator[None]:
        """Keep a run going whose output a full disk does not take: the logs in its folder have all of it.

        A reader who went away (`| head`) wants no more of it: that ends the run, once, and not its clearing up.
        """
        try:
            yield
        except BrokenPipeError:
            if not self._told:
                self._told = True
                raise
        except OSError as error:
            if stream == "out" and not self._told:
                self._told = True
                with suppress(OSError):
                    sys.stderr.write(
                        f"note: standard output cannot be written ({error.strerror}). The run goes on; its logs have it.\n"
                    )


def _pieces(text: str, target: TextIO) -> list[str]:
    """Cut a text into pieces that a pipe takes without waiting; a terminal gets it whole, for its live line."""
    if not text or target.isatty():
        return [text] if text else []
    return [text[start : start + PIECE] for start in range(0, len(text), PIECE)]
