"""SIGTERM, as batch systems send it: the step is finished, a checkpoint saved, in time. SIGUSR1 saves one on the way."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.training.folder import newest_step
from tests.dist.launch.processes import PACELINE, started

TASK = """
import time, torch, paceline
class Slow(paceline.Task):
    batch_size, shards = 4, 2
    def __init__(self, nap: float = 0.05): self.nap = nap
    def model(self): return torch.nn.Linear(2, 1)
    def optimizer(self, model): return torch.optim.SGD(model.parameters(), lr=0.001)
    def train_data(self): return [torch.full((2,), 1.0 + i % 7) for i in range(400)]
    def loss(self, model, batch):
        if self.nap > 1: open("stuck", "w").close()
        time.sleep(self.nap)
        return paceline.Loss.mean(model(batch).sum(-1).square())
"""
STEPS = 40


def read(path):
    return path.read_text() if path.exists() else ""


def train(folder, *more, out="run", nap=0.05):
    (folder / "task.py").write_text(TASK)
    return (
        *PACELINE,
        "train",
        "task.py:Slow",
        "--out",
        out,
        "--set",
        f"nap={nap}",
        "--steps",
        str(STEPS),
        "--json",
        *more,
    )


def result(*command, folder):
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The weights of a run that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole")
    return result(*train(folder, "--strategy", "single", nap=0), folder=folder)["weights_sha256"]


def begun(folder, out="run"):
    return '"step":2,' in read(folder / out / "events.jsonl")


@pytest.mark.parametrize(("strategy", "workers"), [("ddp", 2), ("fsdp", 2), ("single", 1)])
def test_sigterm_saves_behind_the_step_and_leaves_with_143(strategy, workers, tmp_path, whole):
    layout = ("--strategy", strategy, "--workers", str(workers))
    with started(*train(tmp_path, *layout), folder=tmp_path) as command:
        command.wait_until(lambda: begun(tmp_path))
        command.process.terminate()
        status, out, err = command.end()
        assert (status, out, command.left()) == (143, "", {}), err
    step = newest_step(tmp_path / "run")
    assert 2 <= step < STEPS
    assert "SIGTERM: finishing the step and saving a checkpoint, in 30 s at most (--grace)." in err
    assert err.endswith(f"The newest checkpoint is of step {step}; --resume goes on from there.\n")
    assert "Traceback" not in err
    assert result(*train(tmp_path, *layout, "--resume", nap=0), folder=tmp_path)["weights_sha256"] == whole


def test_a_signal_to_every_process_of_a_job_is_the_same(tmp_path, whole):
    with started(*train(tmp_path, "--workers", "2"), folder=tmp_path) as command:
        command.wait_until(lambda: begun(tmp_path))
        for number in (signal.SIGUSR1, signal.SIGTERM):
            for pid in sorted(command.left(), key=lambda pid: pid != command.process.pid):
                os.kill(pid, number)
        status, _, err = command.end()
        assert (status, "Traceback" in err, command.left()) == (143, False, {}), err
    assert result(*train(tmp_path, "--resume", nap=0), folder=tmp_path)["weights_sha256"] == whole


@pytest.mark.parametrize("twice", [False, True])
def test_a_step_that_does_not_end_in_time_or_a_second_sigterm_is_left_at_once(twice, tmp_path):
    grace = "600" if twice else "3"
    with started(*train(tmp_path, "--workers", "2", "--grace", grace, nap=300), folder=tmp_path) as command:
        command.wait_until((tmp_path / "stuck").exists)
        command.process.terminate()
        if twice:
            command.wait_until(lambda: "SIGTERM" in command.process.stderr.readline())
            command.process.terminate()
        status, _, err = command.end()
    assert (status, "Traceback" in err) == (143, False)
    assert twice or "was not done within --grace 3. Leaving at once." in err


@pytest.mark.parametrize(("strategy", "workers"), [("ddp", 2), ("single", 1)])
def test_sigusr1_saves_a_checkpoint_and_the_run_goes_on(strategy, workers, tmp_path, whole):
    with started(
        *train(tmp_path, "--strategy", strategy, "--workers", str(workers)), folder=tmp_path
    ) as command:
        command.wait_until(lambda: begun(tmp_path))
        command.process.send_signal(signal.SIGUSR1)
        command.wait_until(lambda: newest_step(tmp_path / "run") is not None)
        assert newest_step(tmp_path / "run") < STEPS
        status, out, err = command.end()
    assert status == 0, err
    found = json.loads(out.splitlines()[-1])
    assert (found["weights_sha256"], found["recoveries"]) == (whole, [])
    assert err.count(f"SIGUSR1: saving a checkpoint behind this step, in {Path('run', 'checkpoints')}.") == 1


SCRIPT = """
import os, pathlib, time
import paceline

def main(run):
    pathlib.Path(f"ready-{run.world.rank}").touch()
    time.sleep(600)

if __name__ == "__main__":
    try:
        paceline.launch(main, workers=2)
    finally:
        print("the script's own end")
"""


def test_a_script_without_a_folder_ends_cleanly_and_with_the_same_status(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    with started(sys.executable, "script.py", folder=tmp_path) as command:
        command.wait_until(lambda: len(list(tmp_path.glob("ready-*"))) == 2)
        command.process.send_signal(signal.SIGUSR1)
        command.process.terminate()
        status, out, err = command.end()
        assert (status, out, command.left()) == (143, "the script's own end\n", {})
        assert "Traceback" not in err


PLAIN = """
import os, pathlib, signal, sys, time
rank = os.environ["RANK"]

def save(*_):
    time.sleep(2.5)
    pathlib.Path(f"saved-{rank}").touch()
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
pathlib.Path(f"ready-{rank}").touch()
time.sleep(600)
"""


def test_a_plain_script_has_the_grace_to_save_by_itself(tmp_path):
    (tmp_path / "plain.py").write_text(PLAIN)
    with started(*PACELINE, "run", "-n", "2", "--grace", "60", "plain.py", folder=tmp_path) as command:
        command.wait_until(lambda: len(list(tmp_path.glob("ready-*"))) == 2)
        command.process.terminate()
        status, _, err = command.end()
    assert (status, "Traceback" in err, len(list(tmp_path.glob("saved-*")))) == (143, False, 2)
