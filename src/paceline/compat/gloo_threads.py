"""Waits for gloo's own threads before a process ends in the interpreter's way.

A gloo operation is freed by the thread that ran it, a moment after its caller has gone on; freeing a tensor takes Python's lock.
Where the interpreter is at its end by then, Python ends that thread inside a C++ destructor, and the process aborts after all
its work ("terminate called without an active exception"). Destroying the group does not help: torch keeps one that DDP used.
"""

from __future__ import annotations

import time
from pathlib import Path

NAME = "pt_gloo_runloop"
LOOKS = 3
"""How often in a row they must be found asleep: between two looks they have Python's lock to themselves."""
PAUSE_S = 0.001
LONGEST_S = 5.0


def let_gloo_rest() -> None:
    """Return when gloo's threads have nothing left to do, or after a few seconds."""
    tasks = Path("/proc/self/task")
    if not tasks.is_dir():
        return
    asleep, until = 0, time.monotonic() + LONGEST_S
    while asleep < LOOKS and time.monotonic() < until:
        time.sleep(PAUSE_S)
        asleep = 0 if any(_runs(task) for task in tasks.iterdir()) else asleep + 1


def _runs(task: Path) -> bool:
    try:
        name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
    except OSError:  # it has ended
        return False
    return name == NAME and rest.split()[0] == "R"
