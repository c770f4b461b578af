"""Values that stay on this worker for others: each with everyone who holds it; the last that lets go frees it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

Number = tuple[int, int]
"""Names a value among all: the rank of the worker that asked for it, and that worker's count."""
Token = tuple[int, int]
"""Names one hold on a value: the rank of the worker that made it, and that worker's count."""
Hold = tuple[Number, Token]


class _Kept:
    """One value, perhaps still to be made."""

    def __init__(self) -> None:
        self.holders: dict[Token, str] = {}
        self.value: Any = None
        self.made = threading.Event()
        self.waiting: list[Callable[[Any], None]] = []


class ObjectStore:
    """The values of one worker in one session."""

    def __init__(self) -> None:
        self._kept: dict[Number, _Kept] = {}
        self._early: set[Hold] = set()
        """Holds that were released before the message came that they exist."""
        self._lost: set[str] = set()
        # Allocate little under it: that can start the garbage collector, which runs finalizers of the user's.
        self._lock = threading.RLock()

    def hold(self, number: Number, token: Token, holder: str) -> None:
        """Count one more hold on a value, which may still be on its way; a lost worker holds nothing."""
        wanted, fresh = (number, token), self._kept.get(number) or _Kept()
        with self._lock:
            if wanted not in self._early:
                if holder not in self._lost:
                    self._kept.setdefault(number, fresh).holders[token] = holder
                return
            self._early.remove(wanted)
            entry = self._kept.get(number)
            freed = self._kept.pop(number) if entry is not None and not entry.holders else None
        del freed  # not under the lock: with a value may go whatever it held

    def put(self, number: Number, value: Any) -> None:
        """Keep a value for those who hold it, and give it to those who wait; nobody may hold it any more."""
        with self._lock:
            entry = self._kept.get(number)
            if entry is None or entry.made.is_set():
                return
            entry.value = value
            entry.made.set()
            waiting, entry.waiting = entry.waiting, []
        for action in waiting:  # not under the lock: answers are sent from here
            action(value)

    def made(self, number: Number) -> Any:
        """Return a value if it is there, else None."""
        entry = self._kept.get(number)
        return None if entry is None else entry.value

    def local(self, number: Number, timeout_s: float) -> Any:
        """Return a value of this worker; none within the time raises TimeoutError."""
        entry = self._entry(number)
        if not entry.made.wait(timeout_s):
            raise TimeoutError
        return entry.value

    def when_made(self, number: Number, action: Callable[[Any], None]) -> None:
        """Call an action with a value when it is there; no thread waits with it."""
        entry = self._entry(number)
        with self._lock:
            if not entry.made.is_set():
                entry.waiting.append(action)
                return
        action(entry.value)

    def spoil(self, number: Number, failure: Any) -> None:
        """Have whoever wants a value get a failure: the call that was to make it came to nothing."""
        self._entry(number)
        self.put(number, failure)

    def release(self, holds: Iterable[Hold]) -> list[Any]:
        """Take back some holds; returns what nobody holds any more, for the caller to release."""
        freed: list[Any] = []
        with self._lock:
            for one in holds:
                entry = self._kept.get(one[0])
                if entry is None or entry.holders.pop(one[1], None) is None:
                    self._early.add(one)
                elif not entry.holders:
                    freed.append(self._kept.pop(one[0]))
        return freed

    def release_worker(self, worker: str) -> list[Any]:
        """Take back all that a lost worker held; returns as `release` does."""
        with self._lock:
            self._lost.add(worker)
            holds = [
                (number, token)
                for number, entry in self._kept.items()
                for token, holder in entry.holders.items()
                if holder == worker
            ]
        return self.release(holds)

    def clear(self) -> None:
        """Let go of everything: the session has ended."""
        with self._lock:
            freed = list(self._kept.values())
            self._kept.clear()
        freed.clear()  # not under the lock: with a value may go whatever it held

    def _entry(self, number: Number) -> _Kept:
        there = self._kept.get(number)
        if there is not None:
            return there
        fresh = _Kept()
        with self._lock:
            return self._kept.setdefault(number, fresh)
