"""Opens /dev/null where this process was started without standard input, output or error, as with `>&-`."""

from __future__ import annotations

import os
import sys


def fill() -> None:
    """Open what is missing, before a file or a socket takes its number and is written to in its place.

    A number that somebody's file has by now is left to it; this process's own words go nowhere then.
    """
    missing = [number for number in range(3) if not _is_open(number)]
    for _ in missing:
        os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest number that is free
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            own = number in missing
            stream = open(number if own else os.devnull, "w" if number else "r", closefd=not own)  # noqa: SIM115
            setattr(sys, name, stream)


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
