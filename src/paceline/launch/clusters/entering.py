"""Where a call that may join a world begins: it finds out who this process is, and which of its calls this is."""

from __future__ import annotations

from paceline.launch.clusters import joined, mpi, slurm


def enter(*, rendezvous: str | None) -> None:
    """Count the call, and enter the world that srun or mpirun has started this process in.

    Counted before anything is refused: a rank that is refused alone, and goes on to its next call, must not meet the others in
    the middle of this one.
    """
    joined.count_call()
    if rendezvous is None:
        slurm.enter()
    mpi.enter()
