"""The backend on MPI, on ranks that mpiexec has started; skipped where the extra `mpi` is not installed."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import paceline
from paceline.training import trainer
from paceline.training.spec import TrainSpec
from tests.dist.world import mpi_checks
from tests.patience import HANG_S

MPIEXEC = Path(sys.executable).with_name("mpiexec")
TRAIN = ("-m", "paceline", "train", "dense4096", "--steps", "5", "--shards", "4", "--json")
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None or not MPIEXEC.exists(),
    reason="the extra mpi (mpi4py and mpich) is not installed here",
)


def start(folder, *command):
    return subprocess.run(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,  # mpiexec reads for rank 0
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


def under_mpiexec(folder, ranks, *arguments):
    return start(folder, str(MPIEXEC), "-n", str(ranks), sys.executable, *arguments)


@pytest.fixture(scope="module")
def one_process():
    """The weights after five steps of one process."""
    spec = TrainSpec(task="paceline.tasks.dense4096:Dense4096", name="it", steps=5)
    (told,) = paceline.launch(trainer.main, spec, strategy="single", shards=4)
    return told["weights_sha256"]


def test_a_script_that_trains_with_any_backend_checks_operations_and_fails(one_process, tmp_path):
    repository = Path(__file__).parents[3]
    ended = under_mpiexec(repository, 3, "-m", "tests.dist.world.mpi_checks", str(tmp_path))
    checked = ended.stdout.split()[
        : len(mpi_checks.CHECKS)
    ]  # mpiexec says something of the errors that were made
    assert checked == [one.__name__ for one in mpi_checks.CHECKS], ended.stderr
    for rank in range(3):
        told = json.loads((tmp_path / f"told-{rank}.json").read_text())
        assert told == [[3, "mpi", one_process], [3, "gloo", one_process]]
    assert ended.returncode != 0
    assert "ValueError: this rank cannot go on" in ended.stderr


def test_ddp_through_mpiexec_that_the_command_starts_itself(one_process, tmp_path):
    ended = start(
        tmp_path, sys.executable, *TRAIN, "--workers", "2", "--backend", "mpi", "--transport", "gloo"
    )
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    assert (told["workers"], told["transport"], told["weights_sha256"]) == (2, "mpi", one_process)
    assert ended.stderr.count("note: MPI cannot replace a rank that is lost") == 1


LEAVING = """
import sys
from paceline import Task
from paceline.tasks.digits import Digits

class Leaving(Digits):
    def loss(self, model, batch):
        if self.steps_done == 3:
            sys.exit(0)
        return super().loss(model, batch)
"""


def test_a_rank_that_leaves_early_with_status_0_fails_the_run(tmp_path):
    (tmp_path / "leaving.py").write_text(LEAVING)
    ended = under_mpiexec(tmp_path, 2, "-m", "paceline", "train", "leaving.py:Leaving", "--steps", "6")
    assert ended.returncode != 0
    assert "exited with status 0 before its part was done" in ended.stderr


def test_the_launcher_of_another_mpi_is_refused(tmp_path):
    variables = {**os.environ, "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    ended = subprocess.run(
        [sys.executable, *TRAIN, "--backend", "mpi"],
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert ended.returncode == 2, ended.stderr
    (line,) = [one for one in ended.stderr.splitlines() if one.startswith("error: ")]
    assert "this is rank 1 of 2, and MPI that it is rank 0 of 1" in line


def test_a_rank_that_fails_before_all_have_met_ends_the_others(tmp_path):
    collectives = ("-m", "paceline", "collectives")
    ended = start(
        tmp_path,
        *(str(MPIEXEC), "-n", "1", "-env", "PACELINE_SECRET", "short", sys.executable, *collectives),
        *(":", "-n", "1", sys.executable, *collectives),
    )
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.startswith("error: the run's secret has 5 characters")


def test_workers_that_mpi_has_not_started_are_refused():
    with pytest.raises(paceline.InputError, match="mpirun -n 2"):
        paceline.launch(print, workers=2, backend="mpi")
