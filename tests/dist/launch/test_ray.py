"""`--on ray`: what would be started, what is refused, and a run on a real Ray of this machine, where it is installed."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from paceline.errors import InputError
from paceline.launch.clusters.ray import Ray, parse_resources
from paceline.training.options import RunOptions
from tests.patience import HANG_S

COMMAND = [sys.executable, "-m", "paceline", "train", "digits", "--steps", "12", "--json"]


def test_resources_are_read():
    assert parse_resources("CPU=4, GPU=0.5,fast_disk=1") == {"CPU": 4.0, "GPU": 0.5, "fast_disk": 1.0}


@pytest.mark.parametrize("text", ["CPU", "CPU=", "=1", "CPU=many", "CPU=-1", "CPU=inf", "", "CPU=1,"])
def test_wrong_resources_are_refused(text):
    with pytest.raises(InputError, match="is no list of resources"):
        parse_resources(text)


def test_without_resources_a_worker_takes_a_core_and_a_gpu_where_it_wants_one():
    assert Ray(None).resources(RunOptions(workers=3)) == {"CPU": 3.0}
    assert Ray(None).resources(RunOptions(workers=2, device="cuda")) == {"CPU": 2.0, "GPU": 2.0}


def test_the_command_of_a_node_has_what_was_decided_for_it():
    given = [
        "train",
        "digits",
        "--on",
        "ray",
        "--nodes=2",
        "--resources",
        "CPU=1",
        "--workers",
        "2",
        "--json",
    ]
    first, others = map(str, Ray("CPU=1").commands(RunOptions(workers=2, nodes="2", out="runs/x"), given))
    ours = "paceline.cli.remote_end train digits --workers 2 --json --nodes=2 --rendezvous=LEADER:PORT --out=runs/x"
    assert first.startswith("on the first of 2 nodes of Ray's that have CPU=1: python ")
    assert first.endswith(f"{ours} --lead")
    assert others.endswith(ours)


def test_one_node_needs_no_place_to_meet():
    given = ["train", "digits", "--on=ray", "--nodes", "1"]
    (only,) = map(str, Ray(None).commands(RunOptions(workers=1), given))
    assert (
        only == "on a node of Ray's that has CPU=1: python -m paceline.cli.remote_end train digits --nodes=1"
    )


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_it_says_how_to_get_it():
    with pytest.raises(InputError, match=r"pip install 'paceline\[ray\]'"):
        Ray(None).start(RunOptions(workers=2), [])


@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed (the extra ray, which is large)"
)
def test_a_run_on_a_local_ray_has_the_bits_of_one_process(tmp_path, ray_variables):
    def run(*arguments, **variables):
        done = subprocess.run(
            [*COMMAND, *arguments],
            cwd=tmp_path,
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    single = run("--strategy", "single", "--out", "single")
    ours = run("--on", "ray", "--workers", "2", "--out", "ray", **ray_variables)
    assert ours["workers"] == 2
    assert ours["weights_sha256"] == single["weights_sha256"]
    assert (tmp_path / "ray" / "receipt.json").exists()
