"""Where a call that may join a world begins: it finds out who this process is, and which of its calls this is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from paceline.launch.clusters import joined, mpi, slurm


@contextmanager
def entered(*, rendezvous: str | None) -> Iterator[None]:
    """Make a call in the block; the other ranks are told where it ends by an exception."""
    enter(rendezvous=rendezvous)
    with joined.telling():
        yield


def enter(*, rendezvous: str | None) -> None:
    """Count the call, and enter the world that srun or mpirun has started this process in.

    Counted before anything is refused: a rank that is refused alone, and goes on to its next call, must not meet the others in
    the middle of this one.
    """
    joined.count_call()
    if rendezvous is None:
        slurm.enter()
    mpi.enter()
