"""Runs on a real SLURM, of this machine and of two network namespaces: joined by srun, submitted, preempted, cancelled."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.netns import network
from tests.patience import HANG_S, Stopwatch
from tests.slurm.cluster import Cluster, cluster, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
PACELINE = (sys.executable, "-m", "paceline")
SECRET = "a secret of the tasks in these tests"  # noqa: S105
TWELVE_STEPS = "6b81c1f88ad2"
"""How the hash of the weights begins that one process comes to after 12 steps of digits."""


@pytest.fixture(scope="module")
def slurm():
    with cluster() as made:
        yield made


@pytest.fixture(scope="module")
def two_nodes():
    with network(2) as net, cluster(net.machines) as made:
        yield made


def joined(slurm: Cluster, *options: str, folder: Path, secret: str = "") -> dict[str, Any]:
    command = (*PACELINE, "train", "digits", "--steps", "12", "--out", "run", "--json")
    ended = slurm.run("srun", "--ntasks=2", *options, *command, cwd=folder, env={"PACELINE_SECRET": secret})
    assert ended.returncode == 0, ended.stderr
    (line,) = ended.stdout.splitlines()  # from one task alone
    return json.loads(line)


def test_tasks_of_srun_are_the_workers(slurm: Cluster, tmp_path):
    result = joined(slurm, folder=tmp_path)
    assert (result["workers"], result["transport"]) == (2, "shared memory")
    assert result["weights_sha256"].startswith(TWELVE_STEPS)


def test_tasks_on_two_nodes_meet_with_a_secret(two_nodes: Cluster, tmp_path):
    result = joined(two_nodes, "--nodes=2", folder=tmp_path, secret=SECRET)
    assert (result["workers"], result["transport"]) == (2, "gloo")
    assert result["weights_sha256"].startswith(TWELVE_STEPS)


PATIENT = """
import pathlib, time
from paceline.tasks.digits import Digits

class Patient(Digits):
    def loss(self, model, batch):
        while self.steps_done == 4 and not pathlib.Path({go!r}).exists():
            pathlib.Path({waiting!r}).touch()
            time.sleep(0.02)
        return super().loss(model, batch)
"""


class Submitted:
    """A job whose fifth step waits until it may go on."""

    def __init__(self, slurm: Cluster, folder: Path, *options: str) -> None:
        self.slurm, self.folder = slurm, folder
        self.waiting, self.go = folder / "waiting", folder / "go"
        (folder / "task.py").write_text(PATIENT.format(go=str(self.go), waiting=str(self.waiting)))
        command = (
            "submit",
            "task.py:Patient",
            "--on",
            "slurm",
            "--steps",
            "12",
            "--time",
            "10m",
            "--out",
            "the run",
        )
        self.job = self.paceline(*command, *options)["job"]

    def paceline(self, *arguments: str, status: int = 0) -> dict[str, Any]:
        ended = self.slurm.run(*PACELINE, *arguments, *(["--json"] if status == 0 else []), cwd=self.folder)
        assert ended.returncode == status, ended.stderr
        return json.loads(ended.stdout) if status == 0 else {"error": ended.stderr}

    def told(self) -> str:
        """Give what the job has printed."""
        return "".join(path.read_text() for path in (self.folder / "the run" / "logs").glob("slurm-*.log"))

    def wait(self, condition: Callable[[], bool]) -> None:
        watch = Stopwatch()
        while not condition():
            assert watch.seconds() < HANG_S, self.told()
            time.sleep(0.05)

    def let_go_when_told_to_end(self) -> None:
        self.wait(lambda: "finishing the step and saving a checkpoint" in self.told())
        self.go.touch()


def test_a_job_whose_time_is_up_saves_and_is_queued_again_and_comes_to_the_same_weights(
    two_nodes: Cluster, tmp_path
):
    one = Submitted(two_nodes, tmp_path, "--nodes", "2", "--strategy", "fsdp")
    again = one.paceline("submit", "digits", "--on", "slurm", "--out", "the run", status=2)
    assert f"was submitted already: job {one.job} is" in again["error"]
    one.wait(one.waiting.exists)
    two_nodes.run("scancel", "--batch", "--signal=USR1", one.job)
    one.let_go_when_told_to_end()
    one.wait(lambda: two_nodes.state(one.job) == "COMPLETED")
    shown = one.paceline("status", "the run")
    assert (shown["state"], shown["restarts"], shown["step"], shown["saved"]) == ("COMPLETED", 1, 12, 12)
    assert "fsdp on 2 workers" in one.told()
    assert "resumed at step 5" in one.told()
    receipt = json.loads((tmp_path / "the run" / "receipt.json").read_text())
    assert receipt["weights_sha256"].startswith(TWELVE_STEPS)


def test_a_job_that_is_cancelled_saves_and_is_not_queued_again(slurm: Cluster, tmp_path):
    one = Submitted(slurm, tmp_path, "--workers", "2")
    one.wait(one.waiting.exists)
    assert one.paceline("cancel", "the run")["cancelled"]
    one.let_go_when_told_to_end()
    one.wait(lambda: slurm.state(one.job) == "CANCELLED")
    shown = one.paceline("status", "the run")
    assert (shown["state"], shown["restarts"], shown["saved"]) == ("CANCELLED", 0, 5)
    assert not one.paceline("cancel", "the run")["cancelled"]


def test_a_job_that_slurm_refuses_leaves_nothing(slurm: Cluster, tmp_path):
    command = ("submit", "digits", "--on", "slurm", "--partition", "nowhere", "--out", "runs/it")
    ended = slurm.run(*PACELINE, *command, cwd=tmp_path)
    assert ended.returncode == 2
    assert "error: sbatch failed: " in ended.stderr
    assert "invalid partition" in ended.stderr.lower()
    assert list(tmp_path.iterdir()) == []
