"""A run whose folder is moved or removed meanwhile goes on, and says so."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.patience import HANG_S, Stopwatch

TASK = """
import time, torch, paceline
from torch import nn

class Slow(paceline.Task):
    batch_size = 4
    def model(self): return nn.Linear(2, 1)
    def optimizer(self, model): return torch.optim.SGD(model.parameters(), lr=1e-6)
    def train_data(self): return [torch.ones(2) * one for one in range(160)]
    def loss(self, model, batch):
        time.sleep(0.05)
        return paceline.Loss.mean(model(batch).square().flatten())
"""


def remove(folder: Path) -> None:
    """Remove a folder that others write in: what they have made meanwhile may have to go as well."""
    for _ in range(20):
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)
            return
    shutil.rmtree(folder)


@pytest.mark.parametrize("moved", [True, False], ids=["moved", "removed"])
def test_it_is_told(moved: bool, tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(TASK)
    command = [sys.executable, "-m", "paceline", "train", "task.py:Slow", "--workers", "2", "--threads", "1"]
    run, there = tmp_path / "run", tmp_path / "there"
    process = subprocess.Popen(
        [*command, "--save-every", "5", "--out", "run"], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    try:
        watch = Stopwatch()
        while not (run / "checkpoints" / "step-5" / "manifest.json").exists():
            assert process.poll() is None
            assert watch.seconds() < HANG_S
            time.sleep(0.02)
        if moved:
            run.rename(there)
        else:
            remove(run)
        _, err = process.communicate(timeout=HANG_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, err
    assert (
        err.count("run was moved or removed while the run was in progress. Checkpoints go into a new folder")
        == 1
    )
    assert (run / "checkpoints" / "step-40").exists()
    if moved:
        again = [*command, "--out", "there", "--resume", "--steps", "12"]
        done = subprocess.run(
            again, cwd=tmp_path, capture_output=True, text=True, timeout=HANG_S, check=False
        )
        assert done.returncode == 0, done.stderr
