"""A program in place of a worker: what `paceline run --no-python` starts. Imports no torch."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import NoReturn

from paceline.errors import InputError

OPEN_FILES = Path("/proc/self/fd")


def become(arguments: list[str]) -> NoReturn:
    """Replace this process with a program, which keeps its process id, its output and its environment, and nothing else."""
    for one in [*OPEN_FILES.iterdir()]:
        if int(one.name) > 2:
            try:
                os.set_inheritable(int(one.name), False)
            except OSError:  # that of the listing itself
                continue
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # as Python has them for itself
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execvp(arguments[0], arguments)  # noqa: S606  (the user's own program)
    except OSError as error:
        raise InputError(f"the program {arguments[0]} cannot be run: {error.strerror}.") from None
