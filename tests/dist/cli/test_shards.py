"""The number of shards is the task's: the same bits for any number of workers, without an option."""

import json

import pytest

from paceline.tasks import TASKS

LOOSE = """
import torch, paceline
from torch import nn

print("this module is read")

class Loose(paceline.Task):
    batch_size = 16
    def __init__(self, pieces: int = 0):
        if pieces: self.shards = pieces
    def model(self): return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    def optimizer(self, model): return torch.optim.SGD(model.parameters(), lr=0.1)
    def train_data(self): return list(torch.randn(64, 4, generator=torch.Generator().manual_seed(0)))
    def loss(self, model, batch): return paceline.Loss.mean(model(batch).pow(2).squeeze(1))

class Planned(Loose):
    def scheduler(self, optimizer, total_steps):
        import pathlib
        pathlib.Path(f"horizon-{total_steps}").touch()

class Fickle(Loose):
    def __init__(self):
        import pathlib
        self.shards = 3 + len(list(pathlib.Path(".").glob("made-*")))
        pathlib.Path(f"made-{self.shards}").touch()
"""


def trained(command, *arguments, name="loose.py:Loose"):
    ended = command("train", name, "--steps", 2, "--threads", 1, "--json", *arguments)
    assert ended.status == 0, ended.err
    return json.loads(ended.out.splitlines()[-1]), ended


@pytest.mark.parametrize("name", TASKS)
def test_a_built_in_task_has_the_same_bits_on_one_worker_and_on_two(command, folder, name):
    found = [
        json.loads(command("train", name, "--workers", many, "--steps", 2, "--json").out.splitlines()[-1])
        for many in (1, 2)
    ]
    assert len({one["weights_sha256"] for one in found}) == 1
    assert [(one["shards"], one["shards_from"]) for one in found] == [(8, "task"), (8, "task")]


def test_who_says_how_many_shards_and_what_is_said_of_it(command, folder):
    (folder / "loose.py").write_text(LOOSE)
    two, ended = trained(command, "--workers", 2, "--out", "two")
    assert "bitwise: same bits for any number of workers with --shards 2" in ended.err
    assert (two["shards"], two["shards_from"]) == (2, "workers")
    for name in ("spec.json", "receipt.json"):
        text = (folder / "two" / name).read_text()
        assert '"shards_from": "workers"' in text
    alone, _ = trained(command, "--workers", 1, "--out", "alone")
    assert alone["weights_sha256"] != two["weights_sha256"], "one shard is another answer than two"
    # The option that was printed gives those bits.
    same, ended = trained(command, "--workers", 1, "--shards", 2, "--out", "same")
    assert same["weights_sha256"] == two["weights_sha256"]
    assert (same["shards"], same["shards_from"]) == (2, "option")
    assert "same bits for any number of workers (2 shards)" in ended.err
    # A resumed run keeps what it had, before the task's own.
    more, ended = trained(
        command, "--resume", "--out", "two", "--workers", 1, "--steps", 3, "--set", "pieces=4"
    )
    assert (more["shards"], more["shards_from"]) == (2, "workers")
    assert "with --shards 2" in ended.err
    # The task's, made by its constructor; the command line is above it.
    task, ended = trained(command, "--set", "pieces=4", "--out", "task")
    assert (task["shards"], task["shards_from"]) == (4, "task")
    assert ended.out.count("this module is read") == 1, "what reads the task beforehand is not shown"
    said, _ = trained(command, "--set", "pieces=4", "--shards", 2, "--workers", 2, "--out", "said")
    assert said["weights_sha256"] == two["weights_sha256"]


def test_more_workers_than_the_task_has_shards_and_a_task_of_two_minds(command, folder):
    (folder / "loose.py").write_text(LOOSE)
    ended = command("train", "loose.py:Loose", "--set", "pieces=2", "--workers", 3)
    assert (ended.status, ended.out) == (2, "")
    assert "3 workers for 2 shards" in ended.err
    assert "--shards 3" in ended.err
    ended = command("train", "loose.py:Fickle", "--steps", 2)
    assert ended.status == 2, ended.err
    assert "shards = 4, but 3 when" in ended.err
    ended = command("train", "loose.py:Loose", "--set", "pieces=4", "--workers", 2, "--dry-run")
    assert "2 worker(s)" in ended.out
    assert "4 shard(s)" in ended.out
    ended = command("train", "loose.py:Losse")
    assert (ended.status, ended.err.count("\n")) == (2, 1)
    assert "Did you mean 'Loose'?" in ended.err


def test_verify_and_chaos_take_the_tasks_shards(command, folder):
    (folder / "loose.py").write_text(LOOSE)
    ended = command(
        *("verify", "loose.py:Planned", "--set", "pieces=5", "--steps", 1, "--horizon", 7, "--workers", 2),
        *("--no-hash-seed", "--json"),
    )
    # One shard per worker, and the task's own number.
    assert json.loads(ended.out.splitlines()[-1])["shard_counts"] == [2, 5]
    assert [path.name for path in folder.glob("horizon-*")] == ["horizon-7"]
    ended = command(
        *("chaos", "loose.py:Loose", "--set", "pieces=3", "--workers", 2, "--faults", 1, "--kinds", "kill"),
        *("--steps", 4, "--json"),
    )
    assert json.loads(ended.out.splitlines()[-1])["shards"] == 3
