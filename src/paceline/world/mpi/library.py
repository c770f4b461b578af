"""The MPI library of this process: loaded when it is needed, left in an orderly way or not at all. Imports no torch.

A process that leaves MPI_Finalize out is one that failed, and its launcher ends the others. So Finalize is called where all
went well, and never after an error: it would wait for ranks that wait for this one. Of `sys.exit(1)` at the top of a script
Python tells nobody who clears up: Finalize is called then, too, and the others go on to the timeout of what they wait for.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.errors import InputError

_SHARED_MEMORY = "/dev/shm/mpich_shm_"  # noqa: S108  (MPICH's name)
INSTALL = "pip install 'paceline[mpi]'"


@functools.lru_cache(maxsize=1)
def load() -> Any:
    """Return mpi4py's `MPI`, with MPI initialised for several threads; raise InputError where that cannot be."""
    try:
        mpi4py = importlib.import_module("mpi4py")
    except ImportError:
        raise InputError(f"MPI needs mpi4py, which is not installed. Use {INSTALL}.") from None
    # mpi4py would call MPI_Finalize after an error too.
    mpi4py.rc.finalize = False
    try:
        mpi = importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(
            f"mpi4py finds no MPI library ({reason}). Use {INSTALL}, which brings MPICH, or load your cluster's module."
        ) from None
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        raise InputError(
            "this MPI library was started without MPI_THREAD_MULTIPLE, but operations run beside the training here. "
            "Use one that has it: MPICH, Open MPI 4 or Intel MPI do."
        )
    _forget_shared_memory(mpi)
    atexit.register(_leave, mpi)
    return mpi


def _forget_shared_memory(mpi: Any) -> None:
    """Delete the names of MPICH's shared memory once all ranks have it: it would outlive ranks that are killed."""
    mpi.COMM_WORLD.Barrier()
    maps = Path("/proc/self/maps")
    for path in _shared_memory(maps.read_text() if maps.exists() else ""):
        path.unlink(missing_ok=True)


def _shared_memory(maps: str) -> set[Path]:
    """Return the files of MPICH's shared memory, of what Linux says is mapped, that still have a name."""
    names = (line.partition(_SHARED_MEMORY) for line in maps.splitlines())
    return {Path(begin + name) for _, begin, name in names if begin and not name.endswith(" (deleted)")}


_ending: list[Callable[[], None]] = []


def before_leaving(end: Callable[[], None]) -> None:
    """Register what has to be over before MPI_Finalize."""
    _ending.append(end)


_closing: list[Callable[[], None]] = []


def when_all_have_left(close: Callable[[], None]) -> None:
    """Register what only the last rank to leave MPI may do without: it is closed after MPI_Finalize, which waits for all."""
    _closing.append(close)


class _Health:
    """Whether MPI_Finalize may be called."""

    broken = False


def abandon() -> None:
    """Leave this process without MPI_Finalize: an operation has failed, or the run has."""
    _Health.broken = True


def is_healthy() -> bool:
    """Return whether nothing has failed so far."""
    return not _Health.broken


def _leave(mpi: Any) -> None:
    while _ending:
        _ending.pop()()
    # After an exception that nobody caught, the interpreter has put it into sys.last_value.
    if is_healthy() and not hasattr(sys, "last_value") and not mpi.Is_finalized():
        mpi.Finalize()
    for close in _closing:
        close()


def takes_cuda() -> bool:
    """Return whether this MPI library reads and writes the memory of NVIDIA's GPUs by itself."""
    library = ctypes.CDLL(load().__file__)
    ask = getattr(library, "MPIX_Query_cuda_support", None)
    return ask is not None and bool(ask())
