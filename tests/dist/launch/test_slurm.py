"""Runs on a real SLURM of this machine: joined by srun, submitted, preempted, cancelled."""

from __future__ import annotations

import json
import sys

import pytest

from tests.slurm.cluster import Cluster, cluster, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
PACELINE = (sys.executable, "-m", "paceline")
TWELVE_STEPS = "6b81c1f88ad2"
"""How the hash of the weights begins that one process comes to after 12 steps of digits."""


@pytest.fixture(scope="module")
def slurm():
    with cluster() as made:
        yield made


def test_tasks_of_srun_are_the_workers(slurm: Cluster, tmp_path):
    command = (*PACELINE, "train", "digits", "--steps", "12", "--out", "run", "--json")
    ended = slurm.run("srun", "--ntasks=2", *command, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    (line,) = ended.stdout.splitlines()  # from one task alone
    result = json.loads(line)
    assert result["workers"] == 2
    assert result["weights_sha256"].startswith(TWELVE_STEPS)
