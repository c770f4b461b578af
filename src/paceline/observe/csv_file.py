"""Events as a table: one number a line."""

from __future__ import annotations

import csv
import time
from pathlib import Path

from paceline.observe.events import Event, Logged, StepFinished
from paceline.observe.scalars import scalars
from paceline.observe.sinks import drop_torn_line

NAME = "metrics.csv"
HEADER = ("step", "time", "name", "value")


class CsvSink:
    """Appends to `metrics.csv` in the run folder; a step that is taken again comes again, and its last lines count."""

    def __init__(self, folder: Path, *, every: float = 0.5) -> None:
        path = folder / NAME
        folder.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", newline="", encoding="utf-8")
        drop_torn_line(path)
        self._writer = csv.writer(self._file, lineterminator="\n")
        self._every, self._written = every, time.monotonic()
        if path.stat().st_size == 0:
            self._writer.writerow(HEADER)
            self._file.flush()

    def emit(self, event: Event) -> None:
        """Take one event."""
        found = scalars(event)
        if found is not None:
            self._writer.writerows(
                (found.step, f"{found.time:.3f}", name, repr(float(value)))
                for name, value in found.values.items()
            )
        if not isinstance(event, StepFinished | Logged) or time.monotonic() - self._written >= self._every:
            self._written = time.monotonic()
            self._file.flush()

    def close(self) -> None:
        """Write what is left and close the file."""
        self._file.close()
