"""How long a test waits: long enough that only a hang is one, and without the time that a machine gave to others."""

import time

HANG_S = 300.0
"""Behind this a test takes what it waits for to hang."""
TURN_S = 0.1


class Stopwatch:
    """Counts the seconds in which this process had its turns: of a pause of a machine's only `TURN_S` counts.

    It is for whoever looks every few milliseconds.
    """

    def __init__(self) -> None:
        self._seconds, self._last = 0.0, time.monotonic()

    def seconds(self) -> float:
        """Return how many there were by now."""
        now = time.monotonic()
        self._seconds += min(now - self._last, TURN_S)
        self._last = now
        return self._seconds
