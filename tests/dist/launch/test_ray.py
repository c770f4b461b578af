"""`--on ray`: what would be started, what is refused, and a run on a real Ray of this machine, where it is installed."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

import paceline
from paceline.errors import InputError
from paceline.launch.clusters.ray import NodeRunner, Ray, parse_resources
from paceline.training.options import RunOptions
from tests.patience import HANG_S

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed (the extra ray, which is large)"
)
COMMAND = [sys.executable, "-m", "paceline", "train", "digits", "--steps", "12", "--json"]
TROUBLE = """
import sys, threading
import ray
from paceline.errors import PacelineError
from paceline.launch.clusters import ray as ours
from paceline.training.options import RunOptions

ray.init(num_cpus=2, log_to_driver=False, logging_level="error", include_dashboard=False)
ours._ray()
ours.PATIENCE_S = 3.0

def cluster(folder, nodes="1"):
    command = ["train", "digits", "--steps", "1", "--workers", "1"]
    return ours._Cluster(ray, RunOptions(workers=1, nodes=nodes), {"CPU": 2.0}, command, folder)

for nodes in ("1", "2"):
    try:
        cluster("/nowhere", nodes).run()
    except PacelineError as error:
        print(error)

follows = cluster("/nowhere", "2")
follows._ask(ray.get_runtime_context().get_node_id(), follows._fitting())
(one,) = follows._nodes
one.ended = one.actor.follow.remote(["tasks"], "/nowhere", {})
print(follows._why_ended(one))
follows._drop(one)

@ray.remote(num_cpus=1)
class Busy:
    def here(self):
        return True

busy = Busy.remote()
ray.get(busy.here.remote())
threading.Timer(6.0, ray.kill, (busy,)).start()
print(cluster(".").run())
"""


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


def test_what_the_launcher_of_a_node_writes_comes_back_and_nothing_else(tmp_path):
    *chunks, status = NodeRunner().lead(["--version"], str(tmp_path), {})
    said = {name: b"".join(chunk for stream, chunk in chunks if stream == name) for name in ("out", "err")}
    assert (status, said) == (0, {"out": f"{paceline.__version__}\n".encode(), "err": b""})


def test_the_end_of_what_a_follower_wrote_comes_back(tmp_path):
    status, tail = NodeRunner().follow(["frain"], str(tmp_path), {})
    assert status == 2
    assert tail.startswith("error: No such command 'frain'")


def test_a_node_without_the_folder_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        NodeRunner().follow(["tasks"], str(tmp_path / "nowhere"), {})


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_it_says_how_to_get_it():
    with pytest.raises(InputError, match=r"pip install 'paceline\[ray\]'"):
        Ray(None).start(RunOptions(workers=2), [])


@needs_ray
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


@needs_ray
def test_a_node_that_lacks_something_is_named_and_one_that_is_busy_is_waited_for(tmp_path, ray_variables):
    done = subprocess.run(
        [sys.executable, "-c", TROUBLE],
        cwd=tmp_path,
        env={**os.environ, **ray_variables},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, second, barred_s, *listed, status = done.stdout.splitlines()
    assert first == second
    assert first.startswith("the command cannot be run on node ")
    assert "No such file or directory: '/nowhere'. /nowhere and paceline must be there, too." in first
    assert barred_s == "inf"
    assert any("digits" in line for line in listed)
    assert status == "0"
    lacking, busy = [line for line in done.stderr.splitlines() if line.startswith("note: ")]
    assert lacking == f"note: {first} The others go on."
    assert busy.startswith(
        "note: a node that has CPU=2 does not have it free; this waits for it, and asks others."
    )
