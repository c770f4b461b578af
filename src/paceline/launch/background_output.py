"""Shows output from a thread behind a bounded queue: a paused terminal or a full pipe must not stop the launcher."""

from __future__ import annotations

import select
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TextIO

QUEUED = 1 << 20
"""How many characters may wait; what comes then is dropped, and counted."""
FLUSH_S = 5.0
"""How long the end of a launch waits for whoever reads its output."""
_LOOK_S = 0.1
PIECE = 1024
"""Characters that are written at once: a pipe that has room takes as many bytes as they can be without waiting."""


class BackgroundOutput:
    """Carries out what it is given, in order, in a thread of its own."""

    def __init__(self, said_dropped: Callable[[int], None]) -> None:
        """`said_dropped` shows, in that thread, how many lines were dropped, once there is room again."""
        self._said_dropped = said_dropped
        self._changed = threading.Condition()
        self._queue: deque[tuple[Callable[[], None], int, int]] = deque()
        """What is to be called, with the lines and characters that it shows."""
        self._queued = 0
        self._busy = self._closing = self._abandoned = False
        self._dropping = False
        """Whether something was dropped and not told of: until then all that comes is, so that nothing is torn twice."""
        self._dropped = 0
        self._thread = threading.Thread(target=self._work, name="paceline-console", daemon=True)
        self._thread.start()

    def put(self, action: Callable[[], None], lines: int = 1, characters: int = 100) -> None:
        """Have `action` called; where too much waits already it is dropped, and its lines are counted."""
        with self._changed:
            if self._queued + characters > QUEUED or self._dropping:
                self._dropping = True
                self._dropped += lines
            else:
                self._queue.append((action, lines, characters))
                self._queued += characters
            self._changed.notify_all()

    def wait_for_room(self, stream: TextIO) -> bool:
        """Wait, in the thread, until a stream takes a piece without blocking; False where nobody waits for that any more."""
        try:
            descriptor = stream.fileno()
        except (OSError, ValueError, AttributeError):
            return True  # nothing that could block
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        while not self._abandoned:
            if poll.poll(_LOOK_S * 1000):
                return True
        return False

    def close(self, wait_s: float = FLUSH_S) -> int:
        """Show what waits, for a while at most; return how many lines were dropped and not told of."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._changed.wait_for(self._is_idle, wait_s)
            self._abandoned = True
            left = sum(lines for _, lines, _ in self._queue) + self._dropped
            self._queue.clear()
            self._changed.notify_all()
        # One that stands in the kernel, for another writer of the same pipe, is left there.
        self._thread.join(1.0)
        return left

    def _is_idle(self) -> bool:
        return not (self._queue or self._busy or self._dropping)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._queue or self._dropping or self._closing)
                if self._abandoned or (self._closing and not (self._queue or self._dropping)):
                    return
                self._busy = True
                if self._queue:
                    action, _, characters = self._queue.popleft()
                    self._queued -= characters
                else:
                    dropped, self._dropped, self._dropping = self._dropped, 0, False
                    action = partial(self._said_dropped, dropped)
            action()
