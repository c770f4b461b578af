"""The backend on MPI, on ranks that mpiexec has started; skipped where the extra `mpi` is not installed."""

import importlib.util
import json
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


def test_operations():
    repository = Path(__file__).parents[3]
    ended = under_mpiexec(repository, 3, "-m", "tests.dist.world.mpi_checks")
    checked = ended.stdout.split()[
        : len(mpi_checks.CHECKS)
    ]  # mpiexec says something of the errors that were made
    assert checked == [one.__name__ for one in mpi_checks.CHECKS], ended.stderr


def test_ddp_through_mpiexec_that_the_command_starts_itself(one_process, tmp_path):
    ended = start(
        tmp_path, sys.executable, *TRAIN, "--workers", "2", "--backend", "mpi", "--transport", "gloo"
    )
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    assert (told["workers"], told["transport"], told["weights_sha256"]) == (2, "mpi", one_process)
    assert ended.stderr.count("note: MPI cannot replace a rank that is lost") == 1


SEVERAL = """
import json, pathlib
import paceline, torch
from paceline.training import trainer
from paceline.training.spec import TrainSpec

def fails(run):
    if run.world.rank == 1:
        raise ValueError("this rank cannot go on")
    run.world.comm.all_reduce(torch.ones(3))

spec = TrainSpec(task="paceline.tasks.dense4096:Dense4096", name="it", steps=5)
told = []
for asked in ({"strategy": "fsdp", "backend": "mpi"}, {"backend": "gloo"}):
    (one,) = paceline.launch(trainer.main, spec, shards=4, transport="gloo", **asked)
    told.append([one["workers"], one["transport"], one["weights_sha256"]])
pathlib.Path(f"told-{paceline.world.env.identity().rank}.json").write_text(json.dumps(told))
paceline.launch(fails, backend="mpi")
"""


def test_scripts_under_mpirun_with_any_backend_and_a_rank_that_fails(one_process, tmp_path):
    (tmp_path / "script.py").write_text(SEVERAL)
    ended = under_mpiexec(tmp_path, 2, "script.py")
    assert ended.returncode != 0
    assert "ValueError: this rank cannot go on" in ended.stderr
    for rank in range(2):
        told = json.loads((tmp_path / f"told-{rank}.json").read_text())
        assert told == [[2, "mpi", one_process], [2, "gloo", one_process]]


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
