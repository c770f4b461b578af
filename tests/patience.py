"""How long a test waits: long enough that only a hang is one, and without the time that a machine gave to others."""

import time
from pathlib import Path

HANG_S = 300.0
"""Behind this a test takes what it waits for to hang."""
TURN_S = 0.1
AT_LEAST = 0.1
"""Of a second counts this much, however busy the machine is: a hang comes to an end."""
_PRESSURE = Path("/proc/pressure/cpu")


class Stopwatch:
    """Counts the seconds in which processes had their turns.

    Of a pause of a machine's only `TURN_S` counts, and where the kernel says how long some process waited for a core, that is
    taken off. It is for whoever looks every few milliseconds.
    """

    def __init__(self) -> None:
        self._seconds, self._last, self._waited = 0.0, time.monotonic(), waited_for_cores()

    def seconds(self) -> float:
        """Return how many there were by now."""
        now, waited = time.monotonic(), waited_for_cores()
        passed = min(now - self._last, TURN_S)
        self._seconds += max(passed - (waited - self._waited), AT_LEAST * passed)
        self._last, self._waited = now, waited
        return self._seconds


def waited_for_cores() -> float:
    """Return for how many seconds since the start of the machine some process was ready to run, and had no core."""
    try:
        some = _PRESSURE.read_text().splitlines()[0]
        return int(some.rpartition("total=")[2]) / 1e6
    except (OSError, ValueError, IndexError):
        return 0.0  # a kernel that does not count it
