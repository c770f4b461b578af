"""A run on several machines, each a network namespace with a launcher of its own."""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.netns import Machine
from tests.patience import HANG_S, Stopwatch

TIMEOUT_S = 4
SECRET = "a secret of the machines in these tests"  # noqa: S105
STEPS = 160
TASK = """
import os, pathlib, time
import torch, paceline
from torch import nn

class Slow(torch.utils.data.Dataset):
    \"\"\"Takes its time until it is told that the test has seen what it wanted.\"\"\"
    def __len__(self): return 160
    def __getitem__(self, index):
        if not pathlib.Path("hurry").exists():
            time.sleep(0.05)
        if pathlib.Path("flood").exists():
            print("x" * 20_000)
        return torch.linspace(-1, 1, 64).roll(index), torch.tensor([index % 7 / 7])

class Small(paceline.Task):
    batch_size = 8
    def model(self):
        if "FAILS" in os.environ:
            raise OSError("this machine lacks what it needs")
        return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 1))
    def optimizer(self, model): return torch.optim.AdamW(model.parameters(), lr=1e-2)
    def train_data(self): return Slow()
    def loss(self, model, batch):
        x, y = batch
        return paceline.Loss.mean((model(x) - y).pow(2).squeeze(-1))
"""
COMMAND = (sys.executable, "-m", "paceline", "train", "task.py:Small", "--steps", str(STEPS), "--json")


def with_secret(secret: str | None = SECRET) -> dict[str, str]:
    """Give this process's environment, with the run's secret in it."""
    return {**os.environ, **({} if secret is None else {"PACELINE_SECRET": secret})}


@dataclass
class Agent:
    """The command on one machine."""

    process: subprocess.Popen
    err: Path

    def end(self):
        """Wait for the end: the status, the JSON object, the last line of standard error."""
        out, _ = self.process.communicate(timeout=HANG_S)
        lines = out.splitlines()
        said = self.err.read_text().splitlines()
        return self.process.returncode, json.loads(lines[-1]) if lines else None, said[-1] if said else ""


class Trial:
    """One run on several machines, all in one folder."""

    def __init__(self, folder, net):
        self.folder, self.net, self.started = folder, net, 0
        (folder / "task.py").write_text(TASK)

    def start(
        self, machine: Machine, *, nodes: str, secret: str | None = SECRET, fails=False, **options
    ) -> Agent:
        """Give the command on a machine, with a secret in its environment."""
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
                env=with_secret(secret) | ({"FAILS": "1"} if fails else {}),
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
        watch = Stopwatch()
        while not condition():
            assert watch.seconds() < HANG_S, self.told()
            time.sleep(0.05)

    def told(self) -> str:
        """Give what was said and done so far: the commands' messages, the logs of the workers, the last events."""
        run = self.folder / "run"
        kept = (*sorted(self.folder.glob("err-*")), *sorted(run.glob("logs/*")), run / "events.jsonl")
        return "\n".join(f"{path.name}: {path.read_text()[-2000:]}" for path in kept if path.exists())

    def hurry(self):
        """Let the steps be fast from here on."""
        (self.folder / "hurry").touch()
