"""Machines that came to a group in progress and have yet to work in it: where that fails, it is theirs, not the run's."""

from __future__ import annotations

ATTEMPTS = 2
"""How many groups may fail to form with a new machine's workers before it is sent away."""


class Probation:
    """Who is new, and what failed with it: generations, and workers that were never in one."""

    def __init__(self) -> None:
        self._failed: dict[int, set[int]] = {}

    def __contains__(self, index: object) -> bool:
        return index in self._failed

    def __len__(self) -> int:
        return len(self._failed)

    def begin(self, index: int) -> None:
        """Take note of a machine that came late."""
        self._failed[index] = set()

    def end(self, index: int) -> None:
        """Forget one that has worked with the others, or is gone."""
        self._failed.pop(index, None)

    def indices(self) -> list[int]:
        """Return the new machines, the newest last."""
        return sorted(self._failed)

    def failed(self, index: int, attempt: int) -> bool:
        """Count what failed with a machine, each attempt once; return whether that is too often."""
        self._failed[index].add(attempt)
        return len(self._failed[index]) >= ATTEMPTS
