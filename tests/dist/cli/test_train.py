"""`paceline train` and what is made of a run afterwards."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors.torch import load_file

from paceline.checkpoint import weights_sha256

KEYS = {
    "strategy": str,
    "workers": int,
    "shards": int,
    "exactness": str,
    "steps": int,
    "samples": int,
    "loss": float,
    "metrics": dict,
    "weights_sha256": str,
    "step_ms_p50": float,
    "step_ms_p95": float,
    "wall_s": float,
    "restarts": int,
    "recoveries": list,
}

NAN = """
import torch, paceline
from torch import nn

class Breaks(paceline.Task):
    batch_size, epochs = 4, 1
    def model(self): return nn.Linear(1, 1)
    def optimizer(self, model): return torch.optim.SGD(model.parameters(), lr=0.0)
    def train_data(self): return [torch.tensor([float("nan") if i == 17 else 1.0]) for i in range(32)]
    def loss(self, model, batch): return paceline.Loss.mean(model(batch).squeeze(-1))

class Raises(Breaks):
    def train_data(self): return Broken()

class Broken(torch.utils.data.Dataset):
    def __len__(self): return 32
    def __getitem__(self, index):
        if index == 17: raise OSError("disk of sample 17")
        return torch.ones(1)
"""


def result_of(ended):
    """Give the last line of standard output as the object it is."""
    assert ended.status == 0, ended.err
    result = json.loads(ended.out.splitlines()[-1])
    assert {key: type(result[key]) for key in KEYS} == KEYS
    assert all(isinstance(value, float) for value in result["metrics"].values())
    return result


def train(command, *arguments):
    return result_of(command("train", "dense4096", *arguments, "--json"))


def test_dense4096_on_four_workers_is_32_steps_of_32_samples_each(command, folder):
    result = train(command, "--workers", 4, "--epochs", 1, "--out", "run")
    assert result["steps"] * 32 * result["workers"] == result["samples"] == 4096
    assert (result["strategy"], result["shards"], result["exactness"]) == ("ddp", 8, "bitwise")
    assert (result["restarts"], result["recoveries"]) == (0, [])
    run = folder / "run"
    names = {path.name for path in run.iterdir()}
    assert {"spec.json", "events.jsonl", "workers.json", "logs", "checkpoints"} <= names
    assert {f"rank-{rank}.log" for rank in range(4)} <= {path.name for path in (run / "logs").iterdir()}
    assert [path.name for path in (run / "checkpoints").glob("step-*")] == ["step-32"]
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [event["samples"] for event in events if event["kind"] == "step"] == [128] * 32
    roster = json.loads((run / "workers.json").read_text())
    assert [(one["rank"], one["host"]) for one in roster] == [
        (rank, socket.gethostname()) for rank in range(4)
    ]
    assert len({one["pid"] for one in roster}) == 4


def test_ten_steps_and_ten_more_on_other_workers_are_twenty(command, folder):
    straight = train(command, "--workers", 2, "--steps", 20, "--out", "straight")
    train(command, "--workers", 2, "--steps", 10, "--out", "run")
    spoken = command("train", "--workers", 1, "--steps", 15, "--out", "run", "--resume")
    assert (spoken.status, "paceline train dense4096 --resume --out run" in spoken.out) == (0, True)
    resumed = train(command, "--workers", 1, "--steps", 20, "--out", "run", "--resume")
    assert resumed["steps"] == straight["steps"] == 20
    assert resumed["weights_sha256"] == straight["weights_sha256"]
    assert (resumed["shards"], resumed["workers"]) == (8, 1)
    train(command, "--workers", 2, "--compress", "bf16", "--exact", "numeric", "--steps", 1, "--out", "other")
    ended = command(
        "train", "dense4096", "--strategy", "single", "--steps", 2, "--out", "other", "--resume", "--json"
    )
    assert (ended.status, json.loads(ended.out)["workers"]) == (0, 1)
    assert "note: the run had 2 workers; --strategy single goes on with 1 here." in ended.err
    assert "note: the run had --compress bf16, which --strategy single has no use for" in ended.err

    exported = command("export", "run", "--json")
    made = json.loads(exported.out)
    weights = load_file(made["path"])
    assert (made["step"], made["tensors"], list(weights)) == (20, 2, ["bias", "weight"])
    assert weights_sha256(weights) == straight["weights_sha256"]
    again = command("export", "run")
    assert (again.status, again.err.count("\n"), again.err[:7]) == (2, 1, "error: ")


@contextmanager
def seen_in(path: Path) -> Iterator[set[bytes]]:
    """Give what a file holds at any time during the context."""
    contents, ended = {path.read_bytes()}, threading.Event()

    def look() -> None:
        while not ended.wait(0.005):
            contents.add(path.read_bytes())

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield contents
    finally:
        ended.set()
        looking.join()
        contents.add(path.read_bytes())


def test_what_a_run_predicts_is_written_and_the_run_is_left_as_it_was(command, folder):
    run = folder / "run"
    half = train(command, "--batch-size", "128", "--steps", "2", "--out", run)
    spec = (run / "spec.json").read_bytes()
    with seen_in(
        run / "spec.json"
    ) as contents:  # also whoever kills it in the middle finds the run's own options
        made = command("predict", run, "--out", "one.safetensors", "--strategy", "single", "--json")
    assert made.status == 0, made.err
    told = json.loads(made.out.splitlines()[-1])
    assert {name: told[name] for name in ("rows", "step", "weights_sha256")} == {
        "rows": 512,
        "step": 2,
        "weights_sha256": half["weights_sha256"],
    }
    assert contents == {spec}
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-2"]
    again = command("predict", run, "--out", "two.safetensors", "--workers", "2")
    assert again.out.splitlines()[-1] == f"two.safetensors: 512 rows, predicted by {run} at step 2"
    assert (folder / "one.safetensors").read_bytes() == (folder / "two.safetensors").read_bytes()
    for arguments, words in (
        ((run, "--out", "one.csv"), "ends in .safetensors or .npy"),
        ((folder, "--out", "one.npy"), "holds no checkpoint that can be read"),
        ((run,), "Missing option '--out'"),
    ):
        refused = command("predict", *arguments)
        assert refused.status == 2
        assert words in " ".join(refused.err.split())


def test_progress_is_on_standard_error_and_the_summary_on_standard_output(command, folder):
    ended = command("train", "dense4096", "--steps", 3, "--set", "lr=0.01")
    assert ended.status == 0
    assert "step 3/3" in ended.err
    assert "dense4096" in ended.out
    assert "step 3/3" not in ended.out
    assert len(list(folder.glob("runs/dense4096-*"))) == 1


def test_a_dry_run_says_what_would_start_and_starts_nothing(command, folder):
    ended = command("train", "dense4096", "--workers", 2, "--dry-run")
    assert ended.status == 0
    assert ended.out.startswith("local: 2 worker(s)")
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("more", [(), ("--shards", 2)])
@pytest.mark.parametrize(
    ("setting", "words"),
    [("self=1", "unknown option of Digits 'self'"), ("lr=", "--set lr=: Digits wants a float like ")],
)
def test_a_dry_run_refuses_the_settings_that_the_run_would(command, folder, setting, words, more):
    ended = command("train", "digits", "--set", setting, "--dry-run", *more)
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.startswith(f"error: {words}")
    assert ended.err.count("\n") == 1
    assert list(folder.iterdir()) == []


def test_a_dry_run_shows_an_error_of_the_task(command, folder):
    (folder / "task.py").write_text(
        "import paceline\nclass Breaks(paceline.Task):\n    def __init__(self):\n        1 / 0\n"
    )
    ended = command("train", "task.py:Breaks", "--dry-run")
    assert (ended.status, ended.out) == (1, "")
    assert ended.err.splitlines()[-1] == "ZeroDivisionError: division by zero"


def test_a_loss_that_is_no_number_names_step_shard_and_samples(command, folder):
    (folder / "task.py").write_text(NAN)
    ended = command("train", "task.py:Breaks", "--workers", 2, "--out", "run")
    assert (ended.status, ended.out) == (1, "")
    last = ended.err.splitlines()[-1]
    assert "stopped: step " in last
    assert "Traceback" not in ended.err
    shard, samples = last.partition("It comes from shard ")[2].split(", samples ")
    assert shard in ("0", "1")
    assert "17" in samples.split(".")[0].split(", ")


def test_an_exception_in_the_dataset_arrives_as_that_exception(command, folder):
    (folder / "task.py").write_text(NAN)
    ended = command("train", "task.py:Raises", "--workers", 2, "--num-workers", 1, "--out", "run")
    assert ended.status == 1
    assert "OSError" in ended.err
    assert "disk of sample 17" in ended.err
    assert f" on {socket.gethostname()} failed:" in ended.err


def test_collectives_as_an_object_and_as_tables(command, folder):
    ended = command("collectives", "--workers", 2, "--json")
    seen = json.loads(ended.out.splitlines()[-1])
    assert (ended.status, seen["workers"], seen["backend"]) == (0, 2, "gloo")
    found = {one["name"]: one for one in seen["operations"]}
    assert found["all_reduce"]["before"] == [[0, 1], [10, 11]]
    assert found["all_reduce"]["after"] == [[10, 12], [10, 12]]
    shown = command("collectives", "--workers", 2, "--only", "broadcast")
    assert shown.status == 0
    assert "broadcast" in shown.out
    assert "all_reduce" not in shown.out
    assert list(folder.iterdir()) == []
