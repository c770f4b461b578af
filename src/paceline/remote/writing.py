"""To whom the message goes that this thread is writing: references in it are that worker's from then on."""

from __future__ import annotations

import threading
from typing import Any


class _Writing:
    """What is known of each thread's message.

    By the thread's number: the state that Python keeps for a thread of torch's is another each time it calls Python.
    """

    def __init__(self) -> None:
        self._to: dict[int, str] = {}
        self._given: dict[int, list[Any]] = {}

    @property
    def to(self) -> str:
        """The worker's name; none outside of a message."""
        return self._to.get(threading.get_ident(), "")

    @to.setter
    def to(self, worker: str) -> None:
        self._to[threading.get_ident()] = worker

    @property
    def given(self) -> list[Any] | None:
        """The holds that a call hands over; they are taken back where it cannot be sent or read."""
        return self._given.get(threading.get_ident())

    @given.setter
    def given(self, holds: list[Any] | None) -> None:
        if holds is None:
            self._given.pop(threading.get_ident(), None)
        else:
            self._given[threading.get_ident()] = holds


writing = _Writing()
