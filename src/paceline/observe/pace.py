"""How fast a run goes and how long it has left, from events that need not show every step."""

from __future__ import annotations

from collections import deque

from paceline.observe.events import (
    EpochFinished,
    Evaluated,
    Event,
    Logged,
    Regrouped,
    RunStarted,
    StepFinished,
    Straggling,
)

WINDOW = 5.0
"""Seconds the speed is averaged over: short enough to follow a change, long enough not to flicker."""


class Pace:
    """Follows a run: where it stands, how fast it goes now, when it will be done."""

    def __init__(self) -> None:
        self.run: RunStarted | None = None
        self.last: StepFinished | None = None
        self.logged: dict[str, float] = {}
        """What the loop has reported, each name with its newest value."""
        self.slow: dict[int, str] = {}
        """Workers that hold the others up, and what they wait for."""
        self._marks: deque[tuple[float, int]] = deque()

    def follow(self, event: Event) -> None:
        """Take account of one event."""
        match event:
            case StepFinished():
                if not self._marks:
                    # Without a mark before it, a step vouches for its own time.
                    self._marks.append((event.time - event.seconds, event.step - 1))
                self._mark(event.time, event.step)
                self.last = event
            case Logged(values=values):
                self.logged |= values
            case RunStarted():
                self.run, self.last, self.logged = event, None, {}
                self._marks.clear()
            case Evaluated() | EpochFinished() if self._marks:
                # The pause of an evaluation is not the speed of training: move the marks past it.
                pause = event.time - self._marks[-1][0]
                self._marks = deque((time + pause, step) for time, step in self._marks)
            case Straggling(rank=rank, waits_for=waits_for):
                self.slow.pop(rank, None)
                if waits_for:
                    self.slow[rank] = waits_for
            case Regrouped():
                self.slow.clear()  # ranks are others now
            case _:
                pass

    def _mark(self, time: float, step: int) -> None:
        if len(self._marks) > 1 and self._marks[-1][0] - self._marks[-2][0] < WINDOW / 100:
            self._marks.pop()
        self._marks.append((time, step))
        while len(self._marks) > 2 and time - self._marks[1][0] > WINDOW:
            self._marks.popleft()

    @property
    def seconds_per_step(self) -> float | None:
        """The mean time of a step just now; None before the first."""
        if len(self._marks) < 2:
            return None
        (then, first), (now, last) = self._marks[0], self._marks[-1]
        return (now - then) / (last - first) if last > first and now > then else None

    @property
    def samples_per_second(self) -> float | None:
        """The throughput of whole global batches."""
        seconds = self.seconds_per_step
        if seconds is None or self.last is None:
            return None
        return (self.run.batch_size if self.run else self.last.samples) / seconds

    @property
    def seconds_left(self) -> float | None:
        """The time to the last step at today's speed; None where the end or the speed is not known."""
        seconds = self.seconds_per_step
        if seconds is None or self.last is None or self.run is None or self.run.total_steps is None:
            return None
        return max(0, self.run.total_steps - self.last.step) * seconds
