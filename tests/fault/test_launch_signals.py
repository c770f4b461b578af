"""Ctrl-C and SIGTERM: all workers end within two seconds, with one line and no traceback."""

import signal
import sys

import pytest

from tests.dist.launch.processes import PACELINE, started
from tests.patience import Stopwatch

WAITING = """
import os, pathlib, signal, sys, time
if "--stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
pathlib.Path(f"ready-{os.environ['RANK']}").touch()
time.sleep(600)
"""


def ready(folder):
    return len(list(folder.glob("ready-*"))) == 2


@pytest.mark.parametrize(
    ("stop", "arguments", "status"),
    [
        (signal.SIGINT, [], 130),
        (signal.SIGINT, ["--stubborn"], 130),
        (signal.SIGTERM, [], 143),
    ],
    ids=["ctrl-c", "ctrl-c for the deaf", "terminate"],
)
def test_a_stopped_command_ends_all_workers_at_once(stop, arguments, status, tmp_path):
    # Other processes may have the cores for a moment: one time of three must show the two seconds.
    assert any(seconds_to_end(stop, arguments, status, tmp_path / str(time_)) < 2.0 for time_ in range(3))


def seconds_to_end(stop, arguments, status, folder):
    folder.mkdir()
    (folder / "waiting.py").write_text(WAITING)
    with started(*PACELINE, "run", "-n", "2", "waiting.py", *arguments, folder=folder) as command:
        command.wait_until(lambda: ready(folder))
        assert len(command.left()) == 4  # the command, the fork server, two workers
        watch = Stopwatch()
        command.interrupt() if stop == signal.SIGINT else command.process.send_signal(stop)
        command.wait_until(lambda: watch.seconds() and command.process.poll() is not None)
        seconds = watch.seconds()
        ended = command.end()
        assert ended == (status, "", "interrupted: all workers have ended.\n")
        assert command.left() == {}
        return seconds


def test_ctrl_c_while_torch_is_still_loading(tmp_path):
    (tmp_path / "waiting.py").write_text(WAITING)
    with started(*PACELINE, "run", "-n", "2", "waiting.py", folder=tmp_path) as command:
        command.wait_until((tmp_path / "runs").exists)
        command.interrupt()
        status, _, err = command.end()
        assert (status, "Traceback" in err) == (130, False)
        assert command.left() == {}
        assert not list(tmp_path.glob("ready-*"))


IN_PYTHON = """
import time, paceline
def wait(run):
    open(f"ready-{run.world.rank}", "w").close()
    time.sleep(600)
paceline.launch(wait, workers=2, threads=1, device="cpu")
"""


def test_sigterm_to_a_launch_from_python_says_that_it_ends_and_leaves_nothing(tmp_path):
    (tmp_path / "waiting.py").write_text(IN_PYTHON)
    with started(sys.executable, "waiting.py", folder=tmp_path) as command:
        command.wait_until(lambda: ready(tmp_path))
        command.process.terminate()
        assert command.end() == (143, "", "interrupted: all workers have ended.\n")
        assert command.left() == {}


SLOW = """
import time, torch, paceline
class Slow(paceline.Task):
    batch_size = 4
    def model(self): return torch.nn.Linear(2, 1)
    def optimizer(self, model): return torch.optim.SGD(model.parameters(), lr=0.1)
    def train_data(self): return list(torch.ones(400, 2))
    def loss(self, model, batch):
        time.sleep(0.1)
        return paceline.Loss.mean(model(batch).sum(-1))
"""


def test_ctrl_c_in_training_saves_and_says_how_to_go_on(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    train = (*PACELINE, "train", "slow.py:Slow", "--workers", "2", "--out", "run")
    with started(*train, folder=tmp_path) as command:
        command.wait_until(lambda: '"step":2,' in read(tmp_path / "run" / "events.jsonl"))
        command.interrupt()
        status, out, err = command.end()
        (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
        number = saved.name.removeprefix("step-")
        assert (status, out, command.left()) == (130, "", {})
        assert err.endswith(
            f"interrupted: all workers have ended. The newest checkpoint is of step {number}; --resume goes on from there.\n"
        )
        assert "Traceback" not in err


def read(path):
    return path.read_text() if path.exists() else ""
