"""Runs the contract suite on ranks of MPI: `python -m tests.contract.over_mpi`, with pytest's arguments behind it.

Every launch of the suite is a command under mpiexec instead, and tensors travel over MPI also where shared memory would be
faster. It takes minutes, so `make test` leaves it out.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline import strategies
from paceline.training.options import RunOptions
from paceline.world import env
from tests.contract import training
from tests.contract.jobs import Job
from tests.contract.training import Trained
from tests.patience import HANG_S

MPIEXEC = Path(sys.executable).with_name("mpiexec")
RANK = "--rank"


def launch(jobs: Mapping[str, Job], asked: Mapping[str, Any]) -> tuple[dict[str, Trained], ...]:
    """Train on ranks of MPI; what is one process has none."""
    if strategies.entry(asked["strategy"]).processes == 1:
        return training.launch(jobs, asked)
    ranks = RunOptions(**{name: value for name, value in asked.items() if name != "threads"}).processes
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "asked").write_bytes(pickle.dumps((dict(jobs), dict(asked))))
        done = subprocess.run(
            [MPIEXEC, "-n", str(ranks), sys.executable, "-m", "tests.contract.over_mpi", RANK, folder],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=HANG_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        made = [pickle.loads(path.read_bytes()) for path in sorted(Path(folder).glob("made-*"))]  # noqa: S301
    return tuple(one for one in made if one is not None)


def work(run: paceline.Run, jobs: Mapping[str, Job]) -> dict[str, Trained]:
    """Train the jobs, if it is over MPI."""
    assert run.world.backend == "mpi"
    return training.work(run, jobs)


def rank(folder: Path) -> None:
    """Be one of the ranks."""
    jobs, asked = pickle.loads((folder / "asked").read_bytes())  # noqa: S301
    (made,) = paceline.launch(work, jobs, **{"transport": "gloo", **asked, "backend": "mpi"})
    number = env.identity().rank
    (folder / f"made-{number:03}").write_bytes(pickle.dumps(made))


if __name__ == "__main__":
    if sys.argv[1:2] == [RANK]:
        rank(Path(sys.argv[2]))
    else:
        training.launchers.append(launch)
        sys.exit(pytest.main(["tests/contract", "-p", "no:cacheprovider", *sys.argv[1:]]))
