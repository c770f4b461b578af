"""Events that are held back for a moment: if the run ends because of one, its last message reports it instead."""

from __future__ import annotations

import time
from collections.abc import Callable

from paceline.launch.shutdown import FIRST_CAUSE_WAIT_S
from paceline.observe.events import Event


class Announcements:
    """The events that are held back; without that a bug that all workers raise would be shown twice."""

    def __init__(self, tell: Callable[[Event], None]) -> None:
        self._tell = tell
        self._waiting: list[tuple[float, Event]] = []

    @property
    def due(self) -> float | None:
        """When the next is to be told; None where none waits."""
        return self._waiting[0][0] if self._waiting else None

    def add(self, event: Event) -> None:
        """Schedule this one."""
        self._waiting.append((time.monotonic() + FIRST_CAUSE_WAIT_S, event))

    def tell_due(self) -> None:
        """Print those that are due."""
        while self._waiting and time.monotonic() >= self._waiting[0][0]:
            self._tell(self._waiting.pop(0)[1])

    def drop(self) -> None:
        """Drop the rest: the run's last message reports them."""
        self._waiting.clear()

    def tell_all(self) -> None:
        """Emit everything that waits."""
        for _, event in self._waiting:
            self._tell(event)
        self._waiting.clear()
