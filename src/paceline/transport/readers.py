"""Threads that wait for connections together: the kernel wakes the one that was busy last, which reads and does what is asked.

So a message costs one wake. Somebody always waits: a thread that has something to do starts another where it was the last, so
what one of them does, for however long, keeps no message of others waiting.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import time
import traceback
from collections.abc import Callable

MOST = 1024
"""How many threads there are at most."""
READABLE = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLONESHOT
WRITABLE = READABLE | select.EPOLLOUT
_SILENT = select.EPOLLONESHOT
Job = Callable[[], object]
"""What a thread that takes messages has to do."""


class Readers:
    """Calls what was added for a descriptor when something happens to it, once: until it is armed again."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._epoll.register(self._stop, select.EPOLLIN)
        self._ready: dict[int, Callable[[bool], object]] = {}
        self._lock = threading.Lock()
        self._count = self._waiting = 0
        self._going = False
        self._prepare: Job = lambda: None

    def start(self, prepare: Job) -> None:
        """Begin; each thread calls `prepare` first."""
        self._prepare, self._going = prepare, True
        self._add_thread()

    def add(self, descriptor: int, ready: Callable[[bool], object]) -> None:
        """Have `ready` called when a descriptor can be read; it is told whether it may take its time."""
        with self._lock:
            if self._stop < 0:
                raise OSError("closed")
            self._ready[descriptor] = ready
            self._epoll.register(descriptor, READABLE)

    def arm(self, descriptor: int, events: int = READABLE) -> None:
        """Look at a descriptor again."""
        with contextlib.suppress(OSError, ValueError):  # closed by another thread meanwhile
            self._epoll.modify(descriptor, events)

    def silence(self, descriptor: int) -> None:
        """Look at it no more, until it is armed."""
        self.arm(descriptor, _SILENT)

    def remove(self, descriptor: int) -> None:
        """Forget a descriptor, before it is closed."""
        with self._lock:
            if self._ready.pop(descriptor, None) is not None and self._stop >= 0:
                self._epoll.unregister(descriptor)

    def close(self, patience_s: float) -> None:
        """Let threads that wait end, and wait for them; the others end after what they are at."""
        self._going = False
        os.eventfd_write(self._stop, 1)
        limit = time.monotonic() + patience_s
        while self._waiting and time.monotonic() < limit:
            time.sleep(0.001)
        with self._lock:
            if not self._waiting:
                stop, self._stop = self._stop, -1
                self._epoll.close()
                os.close(stop)

    def _add_thread(self) -> None:
        self._count += 1
        self._waiting += 1
        try:
            threading.Thread(target=self._run, daemon=True, name="paceline-calls").start()
        except RuntimeError:  # no more threads here
            self._count -= 1
            self._waiting -= 1

    def _run(self) -> None:
        self._prepare()
        poll, lock = self._epoll.poll, self._lock
        while True:
            found = poll(None, 1) if self._going else ()
            with lock:
                self._waiting -= 1
                if not self._going:
                    self._count -= 1
                    return
                if not self._waiting and self._count < MOST:
                    self._add_thread()
                others = self._waiting > 0
            for descriptor, _ in found:
                ready = self._ready.get(descriptor)
                if ready is not None:
                    try:
                        ready(others)
                    except Exception:  # noqa: BLE001  (a fault of ours: the log has it, and the thread goes on)
                        traceback.print_exc(file=sys.stderr)
            with lock:
                self._waiting += 1
