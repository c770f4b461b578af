"""Starts a command through mpiexec, where its workers are to be ranks of MPI. Imports no torch."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.errors import InputError
from paceline.launch.clusters.commands import PACELINE, Command
from paceline.training.options import RunOptions
from paceline.world.mpi.library import INSTALL


def program() -> str | None:
    """Return the mpiexec beside this Python, which fits the mpich wheel's library; else the one that the shell would find."""
    return shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")


def started(mpiexec: str, ranks: int, arguments: Sequence[str]) -> Command:
    """Return how a command line of paceline's is started as so many ranks."""
    return Command("", (mpiexec, "-n", str(ranks), sys.executable, *PACELINE, *arguments))


class Mpiexec:
    """Starts a command as ranks of MPI."""

    def commands(self, options: RunOptions, arguments: Sequence[str]) -> tuple[Command, ...]:
        """Return the one command, which may start ranks on several machines by itself."""
        found = program()
        if found is None or importlib.util.find_spec("mpi4py") is None:
            missing = "mpiexec" if found is None else "mpi4py"
            raise InputError(
                f"MPI needs {missing}, which is not installed. Use {INSTALL}, which brings MPICH."
            )
        if options.rendezvous is not None or options.max_nodes > 1:
            raise InputError(
                "MPI brings machines together by itself, and --nodes and --rendezvous say how others meet. Use mpirun with a "
                "host file for this command, without both."
            )
        return (started(found, options.processes, arguments),)

    def start(self, options: RunOptions, arguments: Sequence[str]) -> int:
        """Become it."""
        self.commands(options, arguments)[0].become()
