"""Bad input: exit status 2, one line that says what would be right, and nothing left behind."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.patience import HANG_S

TASKS = """
import torch, paceline
from torch import nn

class Good(paceline.Task):
    batch_size = 8
    def __init__(self, width: int = 3): self.width = width
    def model(self): return nn.Linear(self.width, 1)
    def optimizer(self, model): return torch.optim.SGD(model.parameters(), lr=0.1)
    def train_data(self): return torch.ones(16, self.width)
    def loss(self, model, batch): return paceline.Loss.mean(model(batch).squeeze(-1))

class Empty(Good):
    def train_data(self): return torch.ones(0, 3)

class Number(Good):
    def loss(self, model, batch): return model(batch).mean()

class Frozen(Good):
    def model(self): return super().model().requires_grad_(False)

class Needs(Good):
    def __init__(self, size: int): super().__init__()

class Plain:
    pass
"""


@pytest.fixture
def place(folder):
    """A folder with some tasks in it."""
    (folder / "tasks.py").write_text(TASKS)
    return folder


def listing(folder):
    return sorted(str(path) for path in folder.rglob("*") if "__pycache__" not in path.parts)


BAD = {
    "train digts": "unknown task 'digts'. Did you mean 'digits'?",
    "train digits --strategy ddpp": "unknown strategy 'ddpp'. Did you mean 'ddp'?",
    "train digits --backend glo": "unknown --backend 'glo'. Did you mean 'gloo'?",
    "train digits --precision fp23": "unknown --precision 'fp23'. Did you mean 'fp32'?",
    "train digits --device gpu": "unknown --device 'gpu'.",
    "train digits --exact bitwize": "unknown --exact 'bitwize'. Did you mean 'bitwise'?",
    "train digits --schedule gpipe": "--schedule is an option of pp, and --strategy ddp has no use for it.",
    "verify digits --strategy ddp,fsdp --loss-parallel": "--loss-parallel is an option of tp, and --strategy ddp,fsdp has",
    "verify --receipt here --schedule gpipe": "--schedule is an option for verifying a TASK",
    "train nowhere.py:Task": "there is no file nowhere.py.",
    "train no.such.module:Task": "there is no module 'no.such.module'.",
    "train tasks.py:Goood": "'Goood'. Did you mean 'Good'?",
    "train tasks.py:Plain": "Plain is a type, not a paceline.Task. Write class Plain(paceline.Task).",
    "train tasks.py": "tasks (Good, Empty, Number, Frozen, Needs). Say which one",
    "train tasks.py:Good --workers 0": "--workers is 0, but must be at least 1.",
    "train tasks.py:Good --workers -2": "--workers is -2, but must be at least 1.",
    "train tasks.py:Good --workers many": "Invalid value for '--workers'",
    "train tasks.py:Good --threads 0": "--threads is 0, but must be at least 1.",
    "train tasks.py:Good --workers 3 --shards 2": "3 workers for 2 shards",
    "train tasks.py:Good --strategy single --workers 2": "--strategy single is one process, but 2 workers",
    "train tasks.py:Good --workers 2 --batch-size 1": "batch",
    "train tasks.py:Empty": "empty",
    "train tasks.py:Frozen": "no trainable parameter",
    "train tasks.py:Good --epochs 1 --steps 2": "--epochs and --steps both say when to end.",
    "train tasks.py:Good --steps 0": "--steps is 0, but must be at least 1.",
    "train tasks.py:Good --set width": "--set 'width' is not KEY=VALUE",
    "train tasks.py:Good --set widht=4": "unknown option of Good 'widht'. Did you mean 'width'?",
    "train tasks.py:Good --set width=wide": "--set width=wide: Good wants a int like 3.",
    "train tasks.py:Needs": "Needs needs size. Give --set size=VALUE.",
    "train tasks.py:Good --save-every never": "--save-every 'never' is neither",
    "train tasks.py:Good --precision fp16": "fp16",
    "train tasks.py:Good --resume": "--resume needs the folder",
    "train tasks.py:Good --resume --out nothing": "there is no run in nothing.",
    "train tasks.py:Good --out tasks.py": "the run folder tasks.py cannot be written",
    "train tasks.py:Good --out tasks.py/below": "the run folder tasks.py/below cannot be written",
    "train tasks.py:Good --out /proc/run": "the run folder /proc/run cannot be written",
    "train": "Missing argument 'task'. See paceline train --help.",
    "train --resume": "--resume needs the folder",
    "train --resume --out nothing": "Missing argument 'task': nothing holds no run of paceline train that has one.",
    "train tasks.py:Good --nonsense": "No such option: --nonsense",
    "run -n 0 tasks.py": "--workers is 0, but must be at least 1.",
    "run nowhere.py": "there is no script nowhere.py.",
    "run -n 2 -m no.such.module": "there is no module 'no.such.module'.",
    "export nowhere": "nowhere",
    "collectives --workers 1": "--workers is 1, but it takes at least 2",
    "collectives --workers 2 --only brodcast": "unknown operation 'brodcast'. Did you mean 'broadcast'?",
    "tran digits": "No such command 'tran'.",
}


@pytest.mark.parametrize("text", BAD)
def test_one_line_says_what_is_wrong_and_nothing_is_created(text, command, place):
    before = listing(place)
    ended = command(*text.split())
    assert BAD[text] in ended.err
    assert ended.err.startswith("error: ")
    assert ended.err.count("\n") == 1
    assert (ended.status, ended.out) == (2, "")
    assert listing(place) == before


@pytest.mark.parametrize(
    "variables",
    [
        {"OMPI_COMM_WORLD_RANK": "x", "OMPI_COMM_WORLD_SIZE": "2"},
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "batch"},
    ],
)
def test_a_launcher_that_says_nonsense_is_named(variables, command, place):
    run = subprocess.run(
        [sys.executable, "-m", "paceline", "train", "tasks.py:Good"],
        cwd=place,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert run.returncode == 2
    assert run.stderr.startswith("error: ")
    assert run.stderr.count("\n") == 1


def test_a_loss_that_is_none_is_found_at_the_first_step(command, place):
    before = listing(place)
    ended = command("train", "tasks.py:Number")
    announced, reason = ended.err.splitlines()
    assert announced.startswith("Number: ddp on 1 worker")
    assert reason.startswith("error: loss() returned a Tensor")
    assert "Return paceline.Loss.mean(per_item_losses)" in reason
    assert (ended.status, ended.out) == (2, "")
    assert listing(place) == before


def test_a_run_folder_is_neither_overwritten_nor_resumed_as_something_else(command, place):
    assert command("train", "tasks.py:Good", "--workers", 2, "--steps", 1, "--out", "run").status == 0
    before = listing(place)
    spec = (place / "run" / "spec.json").read_bytes()
    events = (place / "run" / "events.jsonl").read_bytes()
    resume = ["train", "tasks.py:Good", "--steps", 2, "--out", "run", "--resume"]
    for arguments, reason in [
        ([*resume[:-1], "--workers", 2], "run already holds a run. Add --resume"),
        ([*resume, "--set", "width=5"], "weight"),
        ([*resume, "--seed", 7], "has seed 0"),
        ([*resume, "--shards", 4], "has shards 2"),
        ([*resume, "--workers", 3], "has 2 shards"),
        ([*resume, "--batch-size", 4], "has batches of 8 samples, not of 4"),
    ]:
        ended = command(*arguments)
        assert reason in ended.err
        assert (ended.status, ended.out, ended.err.count("\n")) == (2, "", 1), ended.err
        assert listing(place) == before
        assert (place / "run" / "spec.json").read_bytes() == spec
        assert (place / "run" / "events.jsonl").read_bytes() == events
    assert command(*resume).status == 0
    assert command("train", "--steps", 3, "--out", "run", "--resume").status == 0  # the run says which task


def test_a_damaged_only_checkpoint_is_no_way_to_resume(command, place):
    command("train", "tasks.py:Good", "--steps", 1, "--out", "run")
    (checkpoint,) = (place / "run" / "checkpoints").glob("step-*")
    for path in checkpoint.iterdir():
        path.write_bytes(b"")
    ended = command("train", "tasks.py:Good", "--steps", 2, "--out", "run", "--resume")
    assert ended.status == 2
    assert ended.err.splitlines()[-1].startswith("error: no checkpoint in run/checkpoints is whole")


def test_what_is_no_file_of_a_run_is_named_before_anything_is_written(command, place):
    run, resume = place / "run", ("train", "tasks.py:Good", "--steps", 2, "--out", "run", "--resume")
    assert command("train", "tasks.py:Good", "--steps", 1, "--out", "run").status == 0
    for name in ("events.jsonl", "workers.json", "logs/rank-0.log", "ledger/rank-0-from-0.bin"):
        (run / name).rename(place / "kept")
        (run / name).mkdir()
        ended = command(*resume)
        assert ended.err.startswith(f"error: run/{name} is no regular file"), ended.err
        assert (ended.status, ended.out, ended.err.count("\n")) == (2, "", 1), ended.err
        (run / name).rmdir()
        (place / "kept").rename(run / name)
    (run / "logs").rename(place / "kept")
    os.mkfifo(run / "logs")
    ended = command(*resume)
    assert ended.err.startswith("error: run/logs is no folder"), ended.err
    (run / "logs").unlink()
    (place / "kept").rename(run / "logs")
    (run / "logs" / "mine").mkdir()  # nothing that a run writes
    assert command(*resume).status == 0


def test_a_run_that_never_began_is_told_in_one_line(command, place):
    assert command("train", "tasks.py:Good", "--workers", 2, "--steps", 1, "--out", "run").status == 0
    shutil.rmtree(place / "run" / "checkpoints")  # what an interrupt before the first step leaves
    (place / "run" / "events.jsonl").unlink()
    ended = command("train", "tasks.py:Good", "--strategy", "single", "--resume", "--out", "run")
    assert ended.err.startswith("error: --resume: there is no run in run."), ended.err
    assert (ended.status, ended.out, ended.err.count("\n")) == (2, "", 1), ended.err


@pytest.mark.parametrize("command", ["train digits --steps 1", "export {there}"])
def test_a_working_folder_that_has_been_deleted(command, tmp_path):
    gone, there = tmp_path / "gone", tmp_path / "there"
    gone.mkdir()
    line = f"rmdir {gone} && exec {sys.executable} -m paceline {command.format(there=there)}"
    arguments = ["sh", "-c", line]
    ended = subprocess.run(arguments, cwd=gone, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
    if command.startswith("train"):
        assert ended.stderr.startswith("error: the working folder of this process has been deleted.")


@pytest.mark.parametrize(("option", "value", "shown"), [("--nodes", "2\nx", r"2\nx"), ("--set", "width=\x1b[31m3", r"\x1b[31m3"),
                                                        ("--strategy", "dd\x07", r"dd\x07")])  # fmt: skip
def test_control_characters_are_spelled_out(command, place, option, value, shown):
    ended = command("train", "tasks.py:Good", "--steps", 1, option, value)
    assert (ended.status, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert shown in ended.err
    assert ended.err[:-1].isprintable()
