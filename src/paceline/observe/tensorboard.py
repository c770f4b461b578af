"""Events as TensorBoard scalars, through tensorboard's own writer, so that torch is not needed."""

from __future__ import annotations

import time as clock
from pathlib import Path
from typing import Any

from paceline.errors import InputError
from paceline.observe.events import Event, RunStarted, StepFinished
from paceline.observe.scalars import Scalars, scalars

_LONGEST_WAIT_S = 3.0


class TensorBoardSink:
    """Writes train/*, epoch/* and eval/* scalars to `tensorboard` in the run folder; events without a curve are left out.

    Of steps in quick succession one in `every` seconds is written: a record costs 0.3 ms of Python.
    """

    def __init__(self, folder: str | Path, *, every: float = 0.1) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ModuleNotFoundError as error:
            raise InputError(
                f"TensorBoard files were asked for, but the package {error.name} is not installed. "
                'Run: pip install "paceline[tensorboard]"'
            ) from error
        self._event: Any = event_pb2.Event
        self._session: Any = event_pb2.SessionLog
        self._summary: Any = summary_pb2.Summary
        self._every = every
        self._written = float("-inf")
        self._held: StepFinished | None = None
        place = Path(folder) / "tensorboard"
        _await_own_second(place)
        self._writer: Any = EventFileWriter(str(place), max_queue_size=1000, flush_secs=2)

    def emit(self, event: Event) -> None:
        """Take one event."""
        if isinstance(event, StepFinished):
            self._held = event
            now = clock.monotonic()
            if now - self._written >= self._every:
                self._written = now
                self._write_held()
            return
        self._write_held()
        match event:
            case RunStarted(start_step=step) if step > 0:
                # TensorBoard then forgets what an interrupted run wrote past the step this one resumes from.
                start = self._session(status=self._session.START)
                self._writer.add_event(self._event(wall_time=event.time, step=step + 1, session_log=start))
            case _:
                self._write(scalars(event))

    def close(self) -> None:
        """Write what is left and close the file."""
        self._write_held()
        self._writer.close()

    def _write_held(self) -> None:
        event, self._held = self._held, None
        if event is not None:
            self._write(scalars(event))

    def _write(self, found: Scalars | None) -> None:
        if found is None:
            return
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in found.values.items()]
        summary = self._summary(value=values)
        self._writer.add_event(self._event(wall_time=found.time, step=found.step, summary=summary))


def _await_own_second(folder: Path) -> None:
    """Wait until a new file comes last: TensorBoard reads files by name, which has the second and then the process."""
    stamps = [path.name.split(".")[3] for path in folder.glob("events.out.tfevents.*")]
    newest = max((int(stamp) for stamp in stamps if stamp.isdigit()), default=0)
    wait = newest + 1 - clock.time()
    if 0 < wait < _LONGEST_WAIT_S:  # else a clock was set back, and waiting helps nobody
        clock.sleep(wait)
