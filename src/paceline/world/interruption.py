"""Makes what waits for other workers stop: for a worker that has learned that one of them is gone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")
LOOK_S = 0.5
"""How often whoever waits for other workers in a step looks whether they will come."""


class InterruptedWaitError(RuntimeError):
    """A wait for other workers was ended, because one of them is gone or another joins."""


class Interruption:
    """Raised once for each group, from any thread; what is in flight in that group then fails."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._raised = False
        self._breakers: list[Callable[[], None]] = []
        self.discards: Callable[[Exception], bool] | None = None
        """Asked while the user's code computes a step: whether a failure is a lost peer, so that the step is discarded."""
        self.forsaken: Callable[[], None] | None = None
        """Raises where a worker that is waited for in a step has left the loop, and will never come."""
        self.absent: Callable[[int], None] | None = None
        """Does so for the one rank that is waited for, wherever in the loop."""

    def outlive(self, action: Callable[[], Value], otherwise: Callable[[], Value]) -> Value:
        """Return what `action` does; where the group breaks in a step that is then discarded, what `otherwise` does.

        For messages in the middle of the user's own code, which no exception may end: it is to come to the end of the step,
        with values that are worth nothing, and is given the step once more.
        """
        try:
            return action()
        except Exception as error:
            if self.discards is None or not self.discards(error):
                raise
            return otherwise()

    @property
    def raised(self) -> bool:
        """Whether the group is being left."""
        return self._raised

    def on_raise(self, breaker: Callable[[], None]) -> None:
        """Register `breaker` to be called on the interruption: at once, if it has come already."""
        with self._lock:
            if not self._raised:
                self._breakers.append(breaker)
                return
        breaker()

    def interrupt(self) -> None:
        """Break every wait of this group."""
        with self._lock:
            if self._raised:
                return
            self._raised = True
            # Nothing of the group is kept: its shared memory goes with the last that holds it.
            breakers, self._breakers = self._breakers, []
        for breaker in breakers:
            breaker()

    def await_change(self, changed: threading.Condition) -> None:
        """Wait for a condition that this thread holds, for a while; raise where who is to bring it will never come."""
        if not changed.wait(LOOK_S) and self.forsaken is not None:
            self.forsaken()

    def check(self) -> None:
        """Raise here if the interruption has come."""
        if self._raised:
            raise broken()


def broken() -> InterruptedWaitError:
    """Return the error of a wait in a group that is to be left."""
    return InterruptedWaitError("the group is broken: a worker was lost, or another one joins")
