"""A command of paceline's started once more through another program, which starts the workers. Imports no torch."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

from paceline.compat.python import run_exit_functions
from paceline.training.options import RunOptions

PACELINE = ("-m", "paceline")


@dataclass(frozen=True)
class Command:
    """What is to be started on one machine."""

    machine: str
    """Which one, in words; empty where there is one."""
    words: tuple[str, ...]

    def __str__(self) -> str:
        line = shlex.join(self.words)
        return f"{self.machine}: {line}" if self.machine else line

    def become(self) -> NoReturn:
        """Replace this process by it."""
        run_exit_functions()  # the fork server is not needed
        sys.stdout.flush()
        sys.stderr.flush()
        os.execv(self.words[0], self.words)  # noqa: S606  (with the user's own arguments)


class Starter(Protocol):
    """Something that starts the workers of a command: each of them then finds itself in its world."""

    def commands(self, options: RunOptions, arguments: Sequence[str]) -> tuple[Command, ...]:
        """Return what would be started for the command line `arguments`, machine by machine."""

    def start(self, options: RunOptions, arguments: Sequence[str]) -> int:
        """Start it, and return the exit status; or become it."""


def without(arguments: Sequence[str], *names: str) -> list[str]:
    """Return a command line without some options, which all take a value."""
    kept: list[str] = []
    rest = iter(arguments)
    for word in rest:
        if word in names:
            next(rest, None)
        elif word.partition("=")[0] not in names:
            kept.append(word)
    return kept
