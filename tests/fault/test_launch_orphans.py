"""No worker outlives its launcher, in whatever manner that one goes."""

import json
import os
import signal
import sys
import time

import pytest

from tests.dist.launch.processes import PACELINE, started

TASK = """
import time
import torch, paceline
from torch import nn

class Slow(torch.utils.data.Dataset):
    def __len__(self): return 1000
    def __getitem__(self, index):
        time.sleep(0.01)
        return torch.ones(3)

class Endless(paceline.Task):
    batch_size, epochs, num_workers = 8, 1000, 1
    def model(self): return nn.Linear(3, 1)
    def optimizer(self, model): return torch.optim.SGD(model.parameters(), lr=1e-3)
    def train_data(self): return Slow()
    def loss(self, model, batch): return paceline.Loss.mean(model(batch).squeeze(-1))
"""
ENDLESS = ("train", "task.py:Endless", "--workers", "2", "--out", "run")
EVERYBODY = 6
"""The command, the fork server, two workers, two processes that load data."""


@pytest.fixture
def training(tmp_path):
    """A training in progress that no lost worker is survived in, with a process that loads data beside each worker."""
    (tmp_path / "task.py").write_text(TASK)
    events = tmp_path / "run" / "events.jsonl"
    with started(*PACELINE, *ENDLESS, "--no-elastic", folder=tmp_path) as command:
        command.wait_until(lambda: events.exists() and '"kind":"step"' in events.read_text())
        assert len(command.left()) == EVERYBODY
        yield command


def test_nothing_is_left_of_a_training_whose_launcher_was_killed(training):
    training.process.kill()
    training.wait_until(lambda: not training.left(), seconds=5)


def test_killing_the_fork_server_ends_the_run_with_one_line(training):
    os.kill(training.fork_server(), signal.SIGKILL)
    status, _, err = training.end()
    assert status == 1
    assert "Traceback" not in err
    assert "the fork server" in err.splitlines()[-1]
    assert "was killed by signal 9" in err.splitlines()[-1]
    training.wait_until(lambda: not training.left(), seconds=5)


def test_killing_one_worker_is_reported_and_ends_the_others(training, tmp_path):
    roster = json.loads((tmp_path / "run" / "workers.json").read_text())
    assert [worker["rank"] for worker in roster] == [0, 1]
    os.kill(roster[1]["pid"], signal.SIGKILL)
    status, _, err = training.end()
    assert status == 1
    assert err.splitlines()[-1] == f"rank 1 on {roster[1]['host']} was killed by SIGKILL."
    training.wait_until(lambda: not training.left(), seconds=5)


@pytest.mark.parametrize("after_s", [0.3, 1.0])
def test_nothing_is_left_of_a_launcher_that_was_killed_very_early(after_s, tmp_path):
    (tmp_path / "task.py").write_text(TASK)
    with started(*PACELINE, *ENDLESS, folder=tmp_path) as command:
        command.wait_until(command.forked)
        time.sleep(after_s)
        command.process.kill()
        command.wait_until(lambda: not command.left(), seconds=5)


LAUNCHER = """
import os, socket, time
from pathlib import Path
from paceline.launch.workers.fork_server import ForkServer

class Mark:
    def __init__(self, number): self.number = number
    def __reduce__(self): return Path.touch, (Path(f"worker-{self.number}"),)

os.environ["PYTHONPATH"] = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
server = ForkServer()
nowhere, (ours, theirs) = os.open(os.devnull, os.O_RDWR), socket.socketpair()
for number in range(24):
    server.request(Mark(number), [nowhere, nowhere, theirs.fileno()], ["takes_long"])
Path("asked").touch()
time.sleep(600)
"""
"""Asks for workers that leave a mark, each in the folder, as soon as they are there."""
TAKES_LONG = """
import time
from pathlib import Path

Path("loading").touch()
while not Path("killed").exists():
    time.sleep(0.01)
"""


def test_nobody_is_forked_any_more_for_a_launcher_that_was_killed(tmp_path):
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    (tmp_path / "takes_long.py").write_text(TAKES_LONG)
    with started(sys.executable, "launcher.py", folder=tmp_path) as command:
        command.wait_until(lambda: (tmp_path / "asked").exists() and (tmp_path / "loading").exists())
        command.process.kill()
        command.process.wait()
        (tmp_path / "killed").touch()
        command.wait_until(lambda: not command.left())
    assert not list(tmp_path.glob("worker-*"))
