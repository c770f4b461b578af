"""Starts a command once more through mpiexec, where its workers are to talk over MPI and no launcher has started it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

from paceline.compat.python import run_exit_functions
from paceline.errors import InputError
from paceline.training.options import RunOptions
from paceline.world import env


def restart_under_mpiexec(options: RunOptions) -> None:
    """Become mpiexec with this command on as many ranks as there are workers; return where that is not needed."""
    if options.backend != "mpi" or options.processes == 1 or env.identity() is not None:
        return
    beside = str(Path(sys.executable).parent)  # the one of the mpich wheel, which fits its library
    program = shutil.which("mpiexec", path=beside) or shutil.which("mpiexec")
    if program is None or importlib.util.find_spec("mpi4py") is None:
        missing = "mpiexec" if program is None else "mpi4py"
        raise InputError(
            f"--backend mpi needs {missing}, which is not installed. Use pip install 'paceline[mpi]', which brings MPICH."
        )
    if options.rendezvous is not None:
        raise InputError(
            "--backend mpi and --rendezvous are two ways to bring machines together. Use mpirun with a host file, or leave "
            "--backend out."
        )
    run_exit_functions()  # the fork server is not needed
    sys.stdout.flush()
    sys.stderr.flush()
    command = [program, "-n", str(options.processes), sys.executable, "-m", "paceline", *sys.argv[1:]]
    os.execv(program, command)  # noqa: S606  (with the user's own arguments)
