"""The progress of a run: one live line on a terminal or in a notebook's cell, a readable log everywhere else."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TextIO

from paceline.compat.python import random_preserved
from paceline.observe import notebook
from paceline.observe.events import (
    CheckpointDamaged,
    CheckpointSaved,
    EpochFinished,
    Event,
    Logged,
    Note,
    RunFailed,
    RunFinished,
    StepFinished,
)
from paceline.observe.pace import Pace
from paceline.observe.sentences import GAP, describe, fields
from paceline.observe.sinks import Sink

if TYPE_CHECKING:
    from rich.text import Text

BAR = (8, 40)
"""Fewest and most characters of the bar."""
DROPPED = ("each", "logged", "speed", "epoch", "left", "slow", "loss")
"""What a narrow terminal goes without, first things first."""
KEPT_LINES = 100
"""Of what a notebook keeps of a run, the last so many."""
CELL_COLUMNS = 100
ERASE_LINE = "\r\x1b[2K"
ERASE_REST = "\x1b[K"


class Progress(Sink, Protocol):
    """A sink that shows a run to a person, and lets other output through without tearing its line."""

    def print(self, text: str, *, error: bool = False) -> None:
        """Put the user's own output above the progress, on standard output or standard error."""


Words = Callable[[str], str]
"""Rewrites a line, for readers to whom options have other names."""


def open_progress(
    stream: TextIO | None = None, output: TextIO | None = None, *, words: Words = str
) -> Progress:
    """Choose how to show progress on `stream` (standard error): live on a terminal and in a notebook, as a log elsewhere."""
    cell = notebook.display() if stream is None else None
    stream = stream or sys.stderr
    output = output or sys.stdout
    if cell is not None:
        return CellProgress(cell, stream, output, words=words)
    if stream.isatty():
        with random_preserved():  # rich draws a number as it is imported, which would be one of the script's
            from rich.console import Console

        if not Console(file=stream).is_dumb_terminal:
            return TerminalProgress(stream, output, words=words)
    return PlainProgress(stream, output, words=words)


class PlainProgress:
    """A log: a line every two seconds of training, and one for every epoch, evaluation, note and failure."""

    def __init__(self, stream: TextIO, output: TextIO, *, every: float = 2.0, words: Words = str) -> None:
        self._stream, self._output, self._every, self._words = stream, output, every, words
        self._pace = Pace()
        self._lock = threading.Lock()
        self._shown = float("-inf")
        self._behind = False
        self._unfinished = False

    def emit(self, event: Event) -> None:
        """Take one event."""
        with self._lock:
            self._pace.follow(event)
            if isinstance(event, Logged):
                return
            if isinstance(event, StepFinished | CheckpointSaved):
                now = time.monotonic()
                self._behind = now - self._shown < self._every
                if self._behind:
                    return
                self._shown = now
            elif isinstance(event, EpochFinished):
                self._behind = False
            elif isinstance(event, RunFinished) and self._behind:
                self._write(GAP.join(fields(self._pace).values()))
            text = (
                GAP.join(fields(self._pace).values())
                if isinstance(event, StepFinished)
                else describe(event, self._pace)
            )
            if text is not None:
                self._write(text)

    def print(self, text: str, *, error: bool = False) -> None:
        """Put the user's own output between the lines, as it is: a long line may come in several pieces."""
        with self._lock:
            stream = self._stream if error else self._output
            stream.write(text)
            stream.flush()
            self._unfinished = error and not text.endswith("\n")

    def close(self) -> None:
        """Write what is still buffered."""
        with self._lock:
            self._stream.flush()

    def _write(self, text: str) -> None:
        _put(self._stream, self._words(f"\n{text}" if self._unfinished else text))
        self._unfinished = False


class TerminalProgress:
    """One live line at the bottom of the terminal, redrawn at most ten times a second.

    The line always leaves the last column free and is redrawn in one write, so it neither wraps nor flickers.
    The cursor stays visible: a run killed from outside leaves the terminal as it found it.
    """

    def __init__(self, stream: TextIO, output: TextIO, *, every: float = 0.1, words: Words = str) -> None:
        from rich.console import Console

        self._stream, self._output, self._every, self._words = stream, output, every, words
        self._console = Console(file=stream, highlight=False, soft_wrap=True)
        self._pace = Pace()
        self._lock = threading.Lock()
        self._drawn = float("-inf")
        self._live = False

    def emit(self, event: Event) -> None:
        """Take one event."""
        with self._lock:
            self._pace.follow(event)
            if isinstance(event, StepFinished | Logged):
                if time.monotonic() - self._drawn >= self._every:
                    self._draw()
                return
            self._erase()
            # Epochs and saved checkpoints pass by on the live line; the rest is worth keeping on the screen.
            if not isinstance(event, EpochFinished | CheckpointSaved):
                text = describe(event, self._pace)
                if text is not None:
                    self._console.print(self._words(text), style=_style(event), markup=False)
            if not isinstance(event, RunFinished | RunFailed):
                self._draw()

    def print(self, text: str, *, error: bool = False) -> None:
        """Put the user's own output above the live line."""
        with self._lock:
            was_live = self._live
            self._erase()
            _put(self._stream if error else self._output, text)
            if was_live:
                self._draw()

    def close(self) -> None:
        """Take the live line away."""
        with self._lock:
            self._erase()

    def _erase(self) -> None:
        if self._live:
            self._stream.write(ERASE_LINE)
            self._stream.flush()
            self._live = False

    def _draw(self) -> None:
        line = live_line(self._pace, _columns(self._stream) - 1, ascii_only=self._console.options.ascii_only)
        with self._console.capture() as captured:
            self._console.print(line, end="")
        self._stream.write("\r" + captured.get() + ERASE_REST)
        self._stream.flush()
        self._live = True
        self._drawn = time.monotonic()


class CellProgress:
    """One output of a notebook's cell, replaced twice a second: what is worth keeping, above a live line."""

    def __init__(
        self,
        cell: notebook.Cell,
        stream: TextIO,
        output: TextIO,
        *,
        every: float = 0.5,
        words: Words = str,
    ) -> None:
        self._cell, self._stream, self._output, self._every, self._words = cell, stream, output, every, words
        self._pace = Pace()
        self._lock = threading.Lock()
        self._drawn = float("-inf")
        self._kept: deque[str] = deque(maxlen=KEPT_LINES)
        self._live = False

    def emit(self, event: Event) -> None:
        """Take one event."""
        with self._lock:
            self._pace.follow(event)
            self._live = not isinstance(event, RunFinished | RunFailed)
            if isinstance(event, StepFinished | EpochFinished | CheckpointSaved):
                if time.monotonic() - self._drawn < self._every:
                    return
            elif (text := describe(event, self._pace)) is not None:
                self._kept.append(self._words(text))
            self._draw()

    def print(self, text: str, *, error: bool = False) -> None:
        """Put the user's own output beside it, where a notebook has output."""
        with self._lock:
            stream = self._stream if error else self._output
            stream.write(text)
            stream.flush()

    def close(self) -> None:
        """Leave what is kept, without the live line."""
        with self._lock:
            self._live = False
            self._draw()

    def _draw(self) -> None:
        live = [live_line(self._pace, CELL_COLUMNS).plain] if self._live and self._pace.run else []
        self._cell.show("\n".join([*self._kept, *live]))
        self._drawn = time.monotonic()


def live_line(pace: Pace, width: int, *, ascii_only: bool = False) -> Text:
    """Compose the live line in at most `width` columns: a narrow one loses parts, never its shape."""
    from rich.text import Text

    parts = fields(pace)
    label = " ".join(pace.run.task.rpartition(":")[2].split())[:24] if pace.run else ""
    total = pace.run.total_steps if pace.run else None
    done = pace.last.step if pace.last else 0
    bar = (BAR[0] + len(GAP)) if total else 0

    def needed() -> int:
        return Text(GAP.join([label, *parts.values()] if label else [*parts.values()])).cell_len + bar

    if bar and pace.last:
        parts["step"] = parts["step"].removeprefix("step ")
    for name in DROPPED:
        if needed() > width:
            parts.pop(name, None)
    if needed() > width:
        label = ""
    line = Text(no_wrap=True)
    if label:
        line.append(label, style="bold").append(GAP)
    if total and needed() <= width:
        _append_bar(line, min(1.0, done / total), min(BAR[1], width - needed() + BAR[0]), ascii_only)
        line.append(GAP)
    for index, (name, text) in enumerate(parts.items()):
        line.append(GAP if index else "").append(text, style={"loss": "bold", "left": "dim"}.get(name, ""))
    line.truncate(max(1, width), overflow="crop")
    return line


def _append_bar(line: Text, share: float, width: int, ascii_only: bool) -> None:
    filled = round(share * width)
    full, rest = ("#", "-") if ascii_only else ("━", "━")
    line.append(full * filled, style="cyan").append(rest * (width - filled), style="bright_black")


def _style(event: Event) -> str | None:
    if isinstance(event, RunFailed):
        return "bold red"
    return "yellow" if isinstance(event, Note | CheckpointDamaged) else None


def _columns(stream: TextIO) -> int:
    # A pseudo-terminal that was never given a size says 0.
    return os.get_terminal_size(stream.fileno()).columns or 80


def _put(stream: TextIO, text: str) -> None:
    stream.write(text if text.endswith("\n") else text + "\n")
    stream.flush()
