"""Processes that write checkpoints until they are killed."""

from __future__ import annotations

import os
import signal
import sys
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path

from tests.checkpoints import Checkpoints
from tests.unit.checkpoint.states import run_state

WIDTH = 160


def save_forever(folder: Path, first_step: int, saved: Connection, keep: int = 2) -> None:
    """Save step after step and tell each step once it is committed."""
    checkpoints = Checkpoints(folder, keep=keep)
    for step in range(first_step, sys.maxsize):
        checkpoints.save(step, run_state(step, WIDTH))
        saved.send(step)


def save_each(folder: Path, steps: int, together: Barrier) -> None:
    """Save step after step, each at the same time as another process does."""
    for step in range(1, steps + 1):
        together.wait(60)
        Checkpoints(folder, keep=2).save(step, run_state(step))


def die_at_operation(folder: Path, step: int, number: int) -> None:
    """Save one step, and die by SIGKILL when Python is about to touch the folder for the given time."""
    state = run_state(step, WIDTH)
    seen = 0

    def count(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        if event.startswith(("os.", "open", "shutil.")) and arguments and str(folder) in str(arguments[0]):
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    Checkpoints(folder, keep=2).save(step, state)
