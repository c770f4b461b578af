"""Counts the groups that form and break again before anybody gets any further, and finds who they break on."""

from __future__ import annotations

from collections import Counter

LIMIT = 3
"""So many groups may come to nothing, one after the other; then whoever they broke on is expelled."""
FIRST_WAIT_S = 0.1
GROWTH = 4.0
"""How long to wait before the second attempt, and how many times as long before each one after it."""


class Attempts:
    """The groups since somebody last finished something."""

    def __init__(self) -> None:
        self.futile = 0
        """How many have come to nothing, one after the other."""
        self.expelled = 0
        """How many workers were expelled for that."""
        self.error = ""
        """What the last failure was, as a worker told it."""
        self._stood: int | None = None
        """How many operations the furthest had finished where the present group formed; None before the first change."""
        self._blamed: Counter[int] = Counter()
        self._counted = False

    def report(self, number: int, error: str) -> None:
        """Take note of a worker that says what kept it from the others; what it says of the group is heard of once."""
        if error:
            self._blamed[number] += 1
            self.error = error

    def broke(self, furthest: int, *, by_itself: bool) -> None:
        """Count a group that all have left, once; `by_itself` where nobody was lost, joins or leaves."""
        if self._counted:
            return
        self._counted = True
        if self._stood is None or furthest > self._stood:
            self.futile = self.expelled = 0
            self._blamed.clear()
        elif by_itself:
            self.futile += 1

    def formed(self, furthest: int) -> None:
        """Begin to watch a group."""
        self._stood, self._counted = furthest, False

    def blame(self, newest: dict[int, int]) -> int:
        """Choose who is expelled: whoever named a failure most often, of equals the last to come; give who came when."""
        self.futile, self.expelled = 0, self.expelled + 1
        blamed = max(newest, key=lambda number: (self._blamed[number], newest[number], number))
        self._blamed.clear()
        return blamed

    @property
    def wait_s(self) -> float:
        """How long to wait before the next attempt."""
        return FIRST_WAIT_S * float(GROWTH ** (self.futile - 1))
