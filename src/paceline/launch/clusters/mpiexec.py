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


class Mpiexec:
    """The mpiexec beside this Python, which fits the library of the mpich wheel; else the one that the shell would find."""

    def commands(self, options: RunOptions, arguments: Sequence[str]) -> tuple[Command, ...]:
        """Return the one command, which may start ranks on several machines by itself."""
        beside = str(Path(sys.executable).parent)
        program = shutil.which("mpiexec", path=beside) or shutil.which("mpiexec")
        if program is None or importlib.util.find_spec("mpi4py") is None:
            missing = "mpiexec" if program is None else "mpi4py"
            raise InputError(
                f"MPI needs {missing}, which is not installed. Use {INSTALL}, which brings MPICH."
            )
        if options.rendezvous is not None or options.max_nodes > 1:
            raise InputError(
                "MPI brings machines together by itself, and --nodes and --rendezvous say how others meet. Use mpirun with a "
                "host file for this command, without both."
            )
        return (Command("", (program, "-n", str(options.processes), sys.executable, *PACELINE, *arguments)),)

    def start(self, options: RunOptions, arguments: Sequence[str]) -> int:
        """Become it."""
        self.commands(options, arguments)[0].become()
