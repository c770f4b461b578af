"""A paceline script started by somebody else's launcher joins that world, and the answer is the same."""

import json
import os
import socket
import subprocess
import sys

import pytest

import paceline
from paceline.launch.control import order
from paceline.launch.run_folder import claim
from paceline.training import trainer
from paceline.training.spec import TrainSpec
from tests.patience import HANG_S

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
LAUNCH = ("-m", "torch.distributed.launch", "--nproc-per-node=2", "--master-port=0", "--rdzv-backend=c10d")

SCRIPT = """
import json, pathlib
import paceline
from paceline.launch.control import order
from paceline.training import trainer
from paceline.training.spec import TrainSpec

def main(run, spec):
    result = trainer.main(run, spec)
    try:
        refused = order(pathlib.Path("run"), {"do": "stop"})
    except paceline.InputError as error:
        refused = str(error)
    run.world.comm.barrier()
    return {"rank": run.world.rank, "size": run.world.size, "sha": result["weights_sha256"], "refused": refused}

spec = TrainSpec(task="paceline.tasks.dense4096:Dense4096", name="it", steps=5)
(told,) = paceline.launch(main, spec, workers=7, out="run")
pathlib.Path(f"told-{told['rank']}.json").write_text(json.dumps(told))
"""


def start(folder, *arguments):
    ended = subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended


@pytest.fixture(scope="module")
def own_answer():
    """The weights after five steps by paceline's own launcher."""
    spec = TrainSpec(task="paceline.tasks.dense4096:Dense4096", name="it", steps=5)
    first, second = paceline.launch(trainer.main, spec, workers=2)
    assert first["weights_sha256"] == second["weights_sha256"]
    return first["weights_sha256"]


@pytest.mark.parametrize("launcher", [TORCHRUN, LAUNCH], ids=["torchrun", "torch.distributed.launch"])
def test_a_script_joins_the_world_it_is_started_in(launcher, own_answer, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    start(tmp_path, *launcher, "script.py")
    told = [json.loads((tmp_path / f"told-{rank}.json").read_text()) for rank in range(2)]
    refused = (
        "the workers of run were started by torchrun, or whatever else has set RANK, which owns them, so they take no orders. "
        "End them there (Ctrl-C, SIGTERM or scancel), and start the run again with --resume, on as many workers as you like."
    )
    assert told == [{"rank": rank, "size": 2, "sha": own_answer, "refused": refused} for rank in range(2)]
    with pytest.raises(paceline.InputError, match="no run is in progress"):
        order(tmp_path / "run", {"do": "stop"})


def test_a_folder_that_cannot_be_written_is_one_line_in_a_world_that_joins(tmp_path):
    alone = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    command = [sys.executable, "-m", "paceline", "train", "digits", "--steps", "1", "--out", "/proc/none/run"]
    ended = subprocess.run(
        command, cwd=tmp_path, env=alone, capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert (ended.returncode, ended.stderr) == (
        2,
        "error: the run folder /proc/none/run cannot be written: No such file or directory. Choose another --out.\n",
    )


def test_a_command_takes_no_heed_of_what_the_older_launcher_puts_before_its_arguments(tmp_path):
    (name,) = start(tmp_path, *LAUNCH[:2], "-m", "paceline", "tasks").stdout.splitlines()[:1]
    assert name.startswith("dense4096")


def test_a_world_that_joins_takes_no_folder_in_which_another_launch_is_at_work(tmp_path):
    command = "-m paceline train digits --steps 2 --out run".split()
    alone = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    (tmp_path / "run").mkdir()
    lock = claim(tmp_path / "run")
    assert lock is not None
    for status in (2, 0):
        ended = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=alone, capture_output=True, text=True, timeout=HANG_S, check=False
        )  # fmt: skip
        assert ended.returncode == status, ended.stderr
        assert ("another launch is at work in run" in ended.stderr) == (status == 2)
        if status:
            os.close(lock)


SLOW = """
import os, pathlib, subprocess, sys
import paceline, torch
from paceline.training import trainer
from paceline.training.spec import TrainSpec

BUSY = "import time; end = time.monotonic() + 5\\nwhile time.monotonic() < end: pass"

def main(run, spec):
    made = trainer.main(run, spec)
    hogs = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(os.cpu_count())]
    for task in pathlib.Path("/proc/self/task").iterdir():
        if "gloo_runloop" in (task / "comm").read_text():
            os.sched_setscheduler(int(task.name), os.SCHED_IDLE, os.sched_param(0))
    for _ in range(3):
        run.world.comm.all_reduce(torch.ones(3))
    return made["steps"]

print(paceline.launch(main, TrainSpec(task="paceline.tasks.dense4096:Dense4096", name="it", steps=2)))
"""


def test_threads_of_gloo_that_are_late_do_not_end_a_script_that_is_done(tmp_path):
    (tmp_path / "script.py").write_text(SLOW)
    start(tmp_path, *TORCHRUN, "script.py")


def test_the_command_line_under_torchrun_that_it_starts_itself(own_answer, tmp_path):
    train = ("-m", "paceline", "train", "dense4096", "--steps", "5", "--out", "run", "--json")
    ended = start(tmp_path, *train, "--workers", "2", "--on", "torchrun")
    (line,) = ended.stdout.splitlines()  # one object, from one rank
    result = json.loads(line)
    assert (result["workers"], result["weights_sha256"]) == (2, own_answer)
    assert {"spec.json", "events.jsonl", "checkpoints"} <= {
        path.name for path in (tmp_path / "run").iterdir()
    }


def test_a_script_under_paceline_run_joins_that_world(own_answer, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    start(tmp_path, "-m", "paceline", "run", "-n", "2", "script.py")
    told = [json.loads((tmp_path / f"told-{rank}.json").read_text()) for rank in range(2)]
    assert [(one["rank"], one["size"], one["sha"]) for one in told] == [
        (rank, 2, own_answer) for rank in range(2)
    ]
    assert all("were started by paceline run, which owns them" in one["refused"] for one in told)


RESUMED = """
import sys
import paceline
from paceline.training import trainer
from paceline.training.spec import TrainSpec

def main(run, spec):
    trainer.main(run, spec)
    if run.world.rank == 0:
        options = run._engine.state.options
        print(options.strategy, options.workers, options.keep, options.total_shards)

spec = TrainSpec(task="paceline.tasks.dense4096:Dense4096", name="it", steps=int(sys.argv[1]))
begin = {"strategy": "single", "keep": 5, "shards": 4} if sys.argv[1] == "2" else {"resume": True}
paceline.launch(main, spec, out="run", **begin)
"""


def test_a_run_that_is_resumed_in_a_world_has_its_workers_and_keeps_the_rest(tmp_path):
    (tmp_path / "script.py").write_text(RESUMED)
    start(tmp_path, "script.py", "2")
    ended = start(tmp_path, *TORCHRUN, "script.py", "4")
    assert ended.stdout.splitlines() == ["ddp 2 5 4"]
    assert ended.stderr.count("note: the run had strategy='single', which 2 workers do not fit: ") == 1


def test_a_rank_that_waits_for_the_others_says_so(tmp_path):
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    waiting = (
        "from paceline.world import Identity, connect, join\n"
        "join.SILENT_S = 0.3\n"
        f"place = {{'master_address': '127.0.0.1', 'master_port': {port}}}\n"
        "connect(Identity(rank=0, size=2, local_rank=0, local_size=2, **place), device='cpu', timeout_s=3)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", waiting],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert ended.returncode != 0
    assert "rank 0 has waited 0 s for all 2 ranks to meet" in ended.stderr


TWICE = """
import json, os, pathlib, time
import paceline
from paceline.training import trainer
from paceline.training.spec import TrainSpec

told = []
for steps in (5, 2, 5):
    spec = TrainSpec(task="paceline.tasks.dense4096:Dense4096", name="it", steps=steps)
    told.append([one["weights_sha256"] for one in paceline.launch(trainer.main, spec)])
    if os.environ["RANK"] == "1":
        time.sleep(0.7)  # the other is at the next launch by now, and must not meet what this one has left of the last
for _ in range(2):
    made = paceline.train("dense4096", steps=5, progress=False)
    told.append((made.weights_sha256, str(made.out)))
pathlib.Path("told-" + os.environ["RANK"] + ".json").write_text(json.dumps(told))
"""


@pytest.mark.parametrize(
    "launcher",
    [TORCHRUN, ("-m", "paceline", "run", "-n", "2"), ()],
    ids=["torchrun", "paceline run", "by hand"],
)
def test_a_world_that_is_there_joins_one_launch_after_the_other(launcher, own_answer, tmp_path):
    (tmp_path / "script.py").write_text(TWICE)
    if launcher:
        start(tmp_path, *launcher, "script.py")
    else:
        start_by_hand(tmp_path, "script.py")
    (first, other, again, *trained), theirs = [
        json.loads((tmp_path / f"told-{rank}.json").read_text()) for rank in range(2)
    ]
    assert [first, other, again, *trained] == theirs
    assert first == again == [own_answer]
    assert other != first
    weights, (one, two) = zip(*trained, strict=True)
    assert set(weights) == {own_answer}
    assert two == f"{one}-2"  # of a run each: nobody goes on with the other's


def start_by_hand(folder, script):
    """Start two ranks that are told only who they are, so that rank 0 keeps torch's store."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    told = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, script], cwd=folder, env={**os.environ, **told, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        for rank in ranks:
            _, errors = rank.communicate(timeout=HANG_S)
            assert rank.returncode == 0, errors
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
