"""Threads that run calls: as many as there are calls at once, so that one that waits for others never keeps another waiting."""

from __future__ import annotations

import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable

import torch

MOST = 1024
"""How many calls a worker can be in at once; more wait their turn."""
Job = Callable[[], object]


class ThreadPool:
    """Grows on demand; the thread that was busy last is taken first."""

    def __init__(self) -> None:
        self._idle: deque[_Thread] = deque()
        self._waiting: deque[Job] = deque()
        self._count = 0
        self._lock = threading.Lock()
        self._open = True

    def submit(self, job: Job) -> None:
        """Run a job soon, on a thread of its own."""
        with self._lock:
            if not self._open:
                return
            if self._idle:
                thread, fresh = self._idle.pop(), False
            elif self._count < MOST:
                self._count += 1
                thread, fresh = _Thread(self), True
            else:
                self._waiting.append(job)
                return
        thread.job = job
        if fresh:
            self._start(thread)
        else:
            thread.wake.release()

    def _start(self, thread: _Thread) -> None:
        try:
            threading.Thread(target=thread.run, daemon=True, name="paceline-calls").start()
        except RuntimeError:  # no more threads here: one that is busy takes it, where there is one
            with self._lock:
                self._count -= 1
                if self._count == 0 or thread.job is None:
                    raise
                self._waiting.append(thread.job)

    def next_job(self, thread: _Thread) -> bool:
        """Assign the thread a job that waits, or note that it is idle, and return which: True for a job."""
        with self._lock:  # both under it: whoever takes an idle thread gives it a job at once
            if self._waiting:
                thread.job = self._waiting.popleft()
                return True
            thread.job = None
            self._idle.append(thread)
            return False

    def close(self) -> None:
        """Let idle threads end; the others end after what they are at."""
        with self._lock:
            self._open = False
            idle = list(self._idle)
            self._idle.clear()
            self._waiting.clear()
        for thread in idle:
            thread.job = None
            thread.wake.release()

    @property
    def is_open(self) -> bool:
        """Whether jobs are taken."""
        return self._open


class _Thread:
    """One thread, and the job that it is to do next."""

    def __init__(self, pool: ThreadPool) -> None:
        self._pool = pool
        self.job: Job | None = None
        self.wake = threading.Lock()
        self.wake.acquire()

    def run(self) -> None:
        torch.get_num_threads()  # a thread that never asked computes on all cores, whatever this worker was given
        while self.job is not None:
            try:
                self.job()
            except BaseException:  # noqa: BLE001  (a fault of ours: the log has it, and the thread goes on)
                traceback.print_exc(file=sys.stderr)
            self.job = None  # what the call held is not to live until the next one
            if not self._pool.is_open:
                return
            if not self._pool.next_job(self):
                self.wake.acquire()
