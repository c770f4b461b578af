"""Who hears what a run says of itself: whoever listens to rank 0, whichever worker that is."""

from __future__ import annotations

import os

from paceline.observe import Fanout, JsonlSink, Note, RelaySink, Sink, open_progress
from paceline.observe.sink_catalogue import check, named
from paceline.observe.sink_process import SinkProcess
from paceline.training.folder import EVENTS
from paceline.training.options import RunOptions


class Listeners(Fanout):
    """The sinks of one worker: open while it has rank 0, none otherwise."""

    def __init__(self, options: RunOptions, events: int | None) -> None:
        """`events` is the descriptor of the launcher's pipe; without one this process's own terminal is told."""
        super().__init__(())
        self._options, self._events = options, events

    def listen(self, *, first: bool) -> None:
        """Open the sinks for a worker that has rank 0 now, and close those of one that has it no longer."""
        if first and not self._sinks:
            self._sinks = self._opened()
        elif not first:
            self.close()

    def flush(self) -> None:
        """Have the run's events on disk: who goes on from a checkpoint tells nothing again of what came before it."""
        for sink in self._sinks:
            if isinstance(sink, JsonlSink):
                sink.flush()

    def _opened(self) -> tuple[Sink, ...]:
        out = self._options.out
        # A copy of the descriptor: rank 0 may go to another worker and come back.
        sinks: list[Sink] = [open_progress() if self._events is None else RelaySink(os.dup(self._events))]
        if out is not None:
            sinks.append(JsonlSink(out / EVENTS))
        names = named(self._options.sink)
        if names:
            check(names, out)
            sinks.append(SinkProcess(names, out, lambda text: self.emit(Note(text=text))))
        return tuple(sinks)
