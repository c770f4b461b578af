"""Several machines, each a network namespace with a launcher of its own: lost, cut off, come back; the bits stay."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.netns import Machine, network

LIMIT_S = 90.0
TIMEOUT_S = 4
STEPS = 400
TASK = """
import pathlib, time
import torch, paceline
from torch import nn

class Slow(torch.utils.data.Dataset):
    \"\"\"Takes its time until it is told that the test has seen what it wanted.\"\"\"
    def __len__(self): return 160
    def __getitem__(self, index):
        if not pathlib.Path("hurry").exists():
            time.sleep(0.02)
        return torch.linspace(-1, 1, 64).roll(index), torch.tensor([index % 7 / 7])

class Small(paceline.Task):
    batch_size = 8
    def model(self): return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 1))
    def optimizer(self, model): return torch.optim.AdamW(model.parameters(), lr=1e-2)
    def train_data(self): return Slow()
    def loss(self, model, batch):
        x, y = batch
        return paceline.Loss.mean((model(x) - y).pow(2).squeeze(-1))
"""
COMMAND = (sys.executable, "-m", "paceline", "train", "task.py:Small", "--steps", str(STEPS), "--json")


@dataclass
class Agent:
    """The command on one machine."""

    process: subprocess.Popen
    err: Path

    def end(self):
        """Wait for the end: the status, the JSON object, the last line of standard error."""
        out, _ = self.process.communicate(timeout=LIMIT_S)
        lines = out.splitlines()
        said = self.err.read_text().splitlines()
        return self.process.returncode, json.loads(lines[-1]) if lines else None, said[-1] if said else ""


class Trial:
    """One run on several machines, all in one folder."""

    def __init__(self, folder, net):
        self.folder, self.net, self.started = folder, net, 0
        (folder / "task.py").write_text(TASK)

    def start(self, machine: Machine, *, nodes: str, **options) -> Agent:
        """Give the command on a machine."""
        leader = self.net.machines[0].address
        given = {
            "workers": 2,
            "nodes": nodes,
            "rendezvous": f"{leader}:29411",
            "machine-timeout": TIMEOUT_S,
            "max-restarts": 0,
            "out": "run",
        } | options
        arguments = [text for name, value in given.items() for text in (f"--{name}", str(value))]
        self.started += 1
        err = self.folder / f"err-{self.started}"
        with err.open("wb") as errors:
            process = machine.run(
                [*COMMAND, *arguments],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        return Agent(process, err)

    def events(self, kind):
        path = self.folder / "run" / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for event in map(json.loads, lines) if event["kind"] == kind]

    def steps(self):
        """Give how many steps are done."""
        done = self.events("step")
        return done[-1]["step"] if done else 0

    def roster(self):
        """Give the workers of the present group, by rank."""
        path = self.folder / "run" / "workers.json"
        return json.loads(path.read_text()) if path.exists() else []

    def places(self):
        """Give the machine of each rank."""
        machines = [machine.pids() for machine in self.net.machines]
        return [[one["pid"] in pids for pids in machines].index(True) for one in self.roster()]

    def wait_until(self, condition):
        started = time.monotonic()
        while not condition():
            said = "\n".join(path.read_text() for path in sorted(self.folder.glob("err-*")))
            assert time.monotonic() - started < LIMIT_S, said
            time.sleep(0.05)

    def hurry(self):
        """Let the steps be fast from here on."""
        (self.folder / "hurry").touch()


@pytest.fixture
def trial(tmp_path):
    with network(2) as net:
        yield Trial(tmp_path, net)


@pytest.fixture(scope="module")
def bits(tmp_path_factory):
    """What one process on one machine comes to."""
    folder = tmp_path_factory.mktemp("single")
    (folder / "task.py").write_text(TASK)
    (folder / "hurry").touch()
    command = [*COMMAND, "--strategy", "single", "--shards", "4", "--out", "run"]
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=LIMIT_S)
    return json.loads(done.stdout.splitlines()[-1])["weights_sha256"]


def test_two_machines_come_to_the_bits_of_one_through_a_cut_that_heals_and_a_lost_worker(trial, bits):
    leader, follower = trial.net.machines
    leading, following = (trial.start(one, nodes="2", **{"max-restarts": 1}) for one in (leader, follower))
    trial.wait_until(lambda: trial.steps() >= 3)
    assert trial.places() == [0, 0, 1, 1]
    trial.net.cut(follower)
    time.sleep(TIMEOUT_S / 3)
    stood = trial.steps()
    trial.net.heal(follower)
    trial.wait_until(lambda: trial.steps() > stood + 1)
    assert trial.events("regrouped") == []
    lost = trial.roster()[-1]["pid"]
    os.kill(lost, signal.SIGKILL)
    trial.wait_until(lambda: trial.events("regrouped") and trial.events("regrouped")[-1]["workers"] == 4)
    assert trial.places() == [0, 0, 1, 1]
    assert lost not in [one["pid"] for one in trial.roster()]
    trial.hurry()
    status, result, _ = leading.end()
    assert (status, result["weights_sha256"], result["restarts"]) == (0, bits, 1)
    assert [one["workers"] for one in result["recoveries"]] == [3, 4]
    status, told, _ = following.end()
    assert status == 0
    assert leader.address in told["led_by"]


def test_a_machine_that_loses_its_power_is_done_without_and_joins_again_when_it_is_back(trial, bits):
    leader, follower = trial.net.machines
    leading = trial.start(leader, nodes="1:2")
    trial.start(follower, nodes="1:2")
    trial.wait_until(lambda: trial.steps() >= 3)
    trial.wait_until(lambda: len(trial.roster()) == 4)
    follower.kill()
    trial.wait_until(lambda: len(trial.roster()) == 2)
    again = trial.start(follower, nodes="1:2")
    trial.wait_until(lambda: len(trial.roster()) == 4)
    trial.hurry()
    status, result, _ = leading.end()
    assert (status, result["weights_sha256"], result["restarts"]) == (0, bits, 0)
    reasons = {one["workers"]: one["reason"] for one in result["recoveries"]}
    assert "was lost with its machine" in reasons[2]
    assert reasons[4] == "a worker joins"
    assert again.end()[0] == 0


def test_a_machine_that_is_cut_off_for_good_ends_by_itself_and_the_others_go_on(trial, bits):
    leader, follower = trial.net.machines
    leading, following = trial.start(leader, nodes="2"), trial.start(follower, nodes="2")
    trial.wait_until(lambda: trial.steps() >= 3)
    before = time.monotonic()
    trial.net.cut(follower)
    status, told, said = following.end()
    assert (status, told) == (1, None)
    assert time.monotonic() - before < 3 * TIMEOUT_S
    assert said.startswith(
        f"error: this machine is cut off from the run that {os.uname().nodename} (10.77.0.1) leads: "
    )
    assert f"for {TIMEOUT_S} s" in said
    assert follower.pids() == []
    trial.wait_until(lambda: len(trial.roster()) == 2)
    trial.hurry()
    status, result, _ = leading.end()
    assert (status, result["weights_sha256"]) == (0, bits)
    assert [one["workers"] for one in result["recoveries"]] == [2]


def test_followers_end_with_the_leader(trial):
    leader, follower = trial.net.machines
    leading, following = trial.start(leader, nodes="2"), trial.start(follower, nodes="2")
    trial.wait_until(lambda: trial.steps() >= 1)
    leading.process.send_signal(signal.SIGKILL)
    status, _, said = following.end()
    assert status == 1
    assert "is cut off from the run" in said
    assert follower.pids() == []
