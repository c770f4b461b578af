"""What the launching process changes where workers import the code anew is refused, and never trained without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TOP = """
import os, time, torch, paceline, settings_of_it
from torch import nn
from torch.utils.data import TensorDataset

POINTS = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
CFG = {"lr": 0.1, "act": nn.ReLU}
SCALE: float = 1.0
BEGUN, OWN = time.time(), os.getpid()
RANK = int(os.environ.get("RANK", "-1"))
IS_MAIN = __name__ == "__main__"
CALLS, CACHE = 0, {}

def remembered(key):
    global CALLS
    CALLS += 1
    return CACHE.setdefault(key, key)

class Lines(paceline.Task):
    batch_size, shards, steps, lr = 16, 2, 2, 0.1
    def model(self): return nn.Linear(4, 1)
    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=self.lr * CFG["lr"] * settings_of_it.FACTOR)
    def train_data(self): return TensorDataset(POINTS, POINTS.sum(1, keepdim=True))
    def loss(self, model, batch):
        return paceline.Loss.mean((model(batch[0]) - batch[1]).square().flatten())

def scaled(): return CFG["lr"] * SCALE

def main(run):
    told = BEGUN, OWN, RANK, IS_MAIN, remembered(3), CALLS, CACHE
    return scaled()

def tried(call):
    try:
        call()
    except paceline.InputError as error:
        print("refused:", error)
    else:
        print("ran")

def train(task): tried(lambda: paceline.train(task, steps=2, threads=1, progress=False, strategy="single"))
def launch(): tried(lambda: paceline.launch(main, threads=1))

if __name__ == "__main__":
"""
SETTING = "settings={'lr': 0.01}, or set it on an instance of the task and give that."


def said(folder: Path, body: str, **environment: str) -> list[str]:
    """What a script prints of its calls."""
    (folder / "settings_of_it.py").write_text("FACTOR = 1\n")
    script = folder / "script.py"
    script.write_text(TOP + "".join(f"    {line}\n" for line in body.splitlines()))
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    found = [line for line in done.stdout.splitlines() if line.startswith(("ran", "refused:"))]
    assert done.returncode == 0, done.stderr
    assert len(found) == body.count("train(") + body.count("launch()"), done.stderr
    return found


def test_a_function_reads_a_global_that_was_changed(tmp_path: Path) -> None:
    remembered, first, table, plain = said(
        tmp_path,
        "remembered(4); launch()\nlaunch()\nCFG['lr'] = 0.01; launch()\nCFG['lr'], SCALE = 0.1, 2.0; launch()",
    )
    assert (remembered, first) == ("ran", "ran"), "what each process has of its own is its own"
    assert table == (
        "refused: CFG is {'lr': 0.01} in the process that launches and {'lr': 0.1} in the workers, which import the script anew: "
        "pass it as an argument, launch(main, CFG), or set it inside of main."
    )
    assert "SCALE is 2.0 in the process that launches and 1.0 in the workers" in plain


def test_a_task_reads_what_was_changed(tmp_path: Path) -> None:
    body = """
Lines.lr = 0.01; train(Lines)
train(Lines())
here = Lines(); here.lr = 0.01; train(here)
Lines.lr = 0.1; settings_of_it.FACTOR = 2; train(Lines)
settings_of_it.FACTOR = 1; Lines.loss = lambda self, model, batch: 0; train(Lines)
""".strip()
    by_class, by_instance, own, module, method = said(tmp_path, body)
    for text in (by_class, by_instance):
        assert "lr of Lines is 0.01 in the process that launches and 0.1 in the workers" in text
        assert text.endswith(SETTING)
    assert own == "ran"
    assert "settings_of_it.FACTOR is 2 in the process that launches and 1 in the workers" in module
    assert "loss of Lines is <lambda> in the process that launches and Lines.loss in the workers" in method


def test_what_torch_makes_tensors_as(tmp_path: Path) -> None:
    for text in said(tmp_path, "torch.set_default_dtype(torch.float64); launch()\ntrain(Lines)"):
        assert (
            "torch's default dtype is torch.float64 in the process that launches and torch.float32 in" in text
        )


@pytest.mark.parametrize("call", ["train(Lines)", "train(Lines())"])
def test_a_process_that_is_a_worker_itself(tmp_path: Path, call: str) -> None:
    world = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    (text,) = said(tmp_path, f"Lines.lr = 0.01; {call}", **world)
    assert "lr of Lines is 0.01 in the process that launches and 0.1 in the workers" in text or (
        text == "ran" and call == "train(Lines())"
    )
