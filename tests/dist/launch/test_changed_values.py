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
RATE = float(os.environ.get("RATE", "0"))

def remembered(key):
    global CALLS
    CALLS += 1
    return CACHE.setdefault(key, key)

class Lines(paceline.Task):
    batch_size, shards, steps, lr, act = 16, 2, 2, 0.1, nn.Identity
    def model(self): return nn.Sequential(self.act(), nn.Linear(4, 1))
    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=self.lr * CFG["lr"] * settings_of_it.FACTOR)
    def train_data(self): return TensorDataset(POINTS, POINTS.sum(1, keepdim=True))
    def loss(self, model, batch):
        return paceline.Loss.mean((model(batch[0]) - batch[1]).square().flatten())

class Given(Lines):
    def optimizer(self, model): return torch.optim.SGD(model.parameters(), lr=RATE)

def scales(run): return SCALE

def rates(task): return round(paceline.train(task, steps=2, progress=False).history.learning_rate[1], 6)

def scaled(): return CFG["lr"] * SCALE

def main(run):
    told = BEGUN, OWN, RANK, RATE, IS_MAIN, remembered(3), CALLS, CACHE
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
MEANT = "Where it is meant so, PACELINE_CHANGED_VALUES=note runs it all the same."
SETTING = "settings={'lr': 0.01}, or set it on an instance of the task and give that. " + MEANT


def started(
    folder: Path, body: str, command: list[str], **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a script."""
    (folder / "settings_of_it.py").write_text("FACTOR = 1\n")
    script = folder / "script.py"
    script.write_text(TOP + "".join(f"    {line}\n" for line in body.splitlines()))
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def said(folder: Path, body: str, told: list[str] | None = None, **environment: str) -> list[str]:
    """What a script prints of its calls; `told` takes the notes."""
    done = started(folder, body, [sys.executable, "script.py"], **environment)
    if told is not None:
        told += [line for line in done.stderr.splitlines() if line.startswith("note:")]
    found = [line for line in done.stdout.splitlines() if line.startswith(("ran", "refused:"))]
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
        "pass it as an argument, launch(main, CFG), or set it inside of main. " + MEANT
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


def test_what_may_matter_is_told_once(tmp_path: Path) -> None:
    body = """
RATE = 0.5; launch()
train(Given); RATE = 0.25
Lines.act = nn.Tanh; train(Lines)
""".strip()
    told: list[str] = []
    assert [one[:7] for one in said(tmp_path, body, told, RATE="0.25")] == ["ran", "ran", "refused"]
    assert len(told) == 2, "by one worker, once in a run"
    assert told[0] == (
        "note: RATE is 0.5 in the process that launches and 0.25 in the workers, which import script.py anew; pass it as an "
        "argument, launch(main, RATE), or set it inside of main, if they are to have it"
    )


def test_a_difference_that_is_meant(tmp_path: Path) -> None:
    told: list[str] = []
    ran = said(
        tmp_path,
        "SCALE = 2.0; launch()\nLines.lr = 0.01; train(Lines)",
        told,
        PACELINE_CHANGED_VALUES="note",
    )
    assert ran == ["ran", "ran"]
    assert "SCALE is 2.0 in the process that launches and 1.0 in the workers" in told[0]
    assert "Lines.lr is 0.01 in the process that launches and 0.1 in the workers" in told[1]


def test_what_workers_cannot_find(tmp_path: Path) -> None:
    body = """
class Late(Lines): lr = 0.2
train(Late)
made = Lines(); made.make = lambda: 1; train(made)
""".strip()
    late, made = said(tmp_path, body)
    assert "has no Late where workers read it" in late
    assert 'nothing that stands under `if __name__ == "__main__":`. Define Late above.' in late
    assert "Lines has make (a lambda), which cannot be sent to another process" in made


JOINED = (
    "Lines.lr = SCALE = 0.01\nprint(rates(Lines), rates(Lines()), paceline.launch(scales)[0], flush=True)"
)


@pytest.mark.parametrize("starter", ["itself", "torchrun", "paceline run"])
def test_a_process_that_is_a_worker_itself_has_what_it_has_set(tmp_path: Path, starter: str) -> None:
    world = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    scripts = Path(sys.executable).parent
    commands = {
        "itself": [sys.executable, "script.py"],
        "torchrun": [str(scripts / "torchrun"), "--nproc-per-node", "2", "script.py"],
        "paceline run": [str(scripts / "paceline"), "run", "--workers", "2", "script.py"],
    }
    done = started(tmp_path, JOINED, commands[starter], **(world if starter == "itself" else {}))
    assert "0.001 0.001 0.01" in done.stdout.splitlines(), done.stderr
