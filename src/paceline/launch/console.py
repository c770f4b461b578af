"""What a launch shows: rank 0's own output, and the events of the run as they come."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from paceline.observe.events import CheckpointDamaged, Event, Note, RunFinished, WorkerLost, from_json
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
        self._told = False
        """Whether it was printed, or raised, that standard output cannot be written."""
        self.result: dict[str, Any] | None = None

    def output(self, stream: str, chunk: bytes) -> None:
        """Show bytes that rank 0 wrote to its standard output ("out") or error ("err")."""
        text = self._decoders[stream].decode(chunk)
        with self._surviving(stream):
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
        with self._surviving("err"):
            if self._progress is not None:
                self._progress.emit(event)
            elif (isinstance(event, WorkerLost) and event.trace) or isinstance(event, self._warnings):
                sys.stderr.write(f"{describe(event, Pace())}\n")

    def close(self) -> None:
        """Take the progress line away."""
        with self._surviving("err"):
            if self._progress is not None:
                self._progress.close()

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
