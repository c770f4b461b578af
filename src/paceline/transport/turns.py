"""Whose turn it is to read a connection: the thread that took requests from it carries them out first, while they are short.

No other thread is woken for them then. One that takes its time, or waits for another worker, hands the connection and what is
left to others: at once where it says so, after a few milliseconds otherwise.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from paceline.transport.readers import Job

_TICK_S = 0.002
"""A request that takes longer than one to two of these is no short one."""
_IDLE_TICKS = 5


class Turn:
    """Requests that one thread has taken, until it or somebody else hands the connection on."""

    __slots__ = ("_hand_on", "_jobs", "_mine", "since")

    def __init__(self, jobs: list[Job], hand_on: Callable[[list[Job]], None]) -> None:
        """`hand_on` gets what is left to do, once."""
        self._jobs, self._hand_on = deque(jobs), hand_on
        self._mine = threading.Lock()
        self.since = 0
        """When the thread began with what it is at."""

    def next(self) -> Job | None:
        """Return what is to be done next; None where it is over."""
        try:
            return self._jobs.popleft()
        except IndexError:
            return None

    def end(self) -> None:
        """Hand the connection on, with what is left; nothing happens where that has been done."""
        if self._mine.acquire(blocking=False):
            left = []
            while (job := self.next()) is not None:
                left.append(job)
            self._hand_on(left)


class Turns:
    """Sees to it that no turn lasts."""

    def __init__(self) -> None:
        self._turns: dict[int, Turn] = {}
        self._own = threading.local()
        self._now = 0
        self._wake = threading.Lock()
        self._wake.acquire()
        self._asleep = self._going = True
        self._lock = threading.Lock()

    def start(self) -> None:
        """Begin."""
        threading.Thread(target=self._watch, daemon=True, name="paceline-turns").start()

    def run(self, turn: Turn) -> None:
        """Carry requests out in this thread."""
        key = id(turn)
        self._turns[key] = turn
        self._own.turn = turn
        if self._asleep:
            self._rouse()
        if not self._going:
            turn.end()
        try:
            while (job := turn.next()) is not None:
                turn.since = self._now
                job()
        finally:
            self._own.turn = None
            del self._turns[key]
            turn.end()

    def end_own(self) -> None:
        """Hand on what this thread has taken: it is going to wait."""
        turn = getattr(self._own, "turn", None)
        if turn is not None:
            turn.end()

    def close(self) -> None:
        """End, and hand on what is at hand: whoever closes connections waits for none of it."""
        self._going = False
        self._rouse()
        for turn in list(self._turns.values()):
            turn.end()

    def _rouse(self) -> None:
        with self._lock:
            if self._asleep:
                self._asleep = False
                self._wake.release()

    def _watch(self) -> None:
        idle = _IDLE_TICKS
        while self._going:
            if idle >= _IDLE_TICKS:
                self._wake.acquire()
                idle = 0
            time.sleep(_TICK_S)
            before, self._now = self._now, self._now + 1
            turns = list(self._turns.values())
            for turn in turns:
                if turn.since < before:
                    turn.end()
            idle = 0 if turns else idle + 1
            if idle >= _IDLE_TICKS:
                with self._lock:
                    self._asleep = True
                if self._turns:  # it began before it could see that
                    self._rouse()
