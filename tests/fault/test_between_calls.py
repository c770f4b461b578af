"""What a loop does between two calls of `run.steps`, at an epoch's end or behind a step is never lost with a worker."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline
from paceline.errors import WorkerFailedError
from tests.fault.survivors import BATCH, Samples, mean_output, set_off

STEPS = 4
Faults = list[tuple[str, int, int, str]]


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def halve(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"] /= 2
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(0.5)


def train(run: paceline.Run, folder: str, faults: Faults, *, waits: bool) -> tuple[str, dict[str, Any]]:
    """Change learning rate and weights wherever a loop can; who is alone `waits` for another to join."""
    model, optimizer = run.prepare(make, lambda made: torch.optim.AdamW(made.parameters(), lr=0.05))
    notes = run.register("notes", {"calls": 0, "ends": 0})

    def end_epoch(epoch: int) -> None:
        halve(model, optimizer)
        notes["ends"] += 1
        set_off(run, folder, faults, "end")
        run.evaluate(Samples(), mean_output)

    for call in range(2):
        for step in run.steps(Samples(), batch_size=BATCH, steps=(STEPS, 17)[call], after_epoch=end_epoch):
            set_off(run, folder, faults, f"call {call}")
            if waits and run.world.size < 2:
                time.sleep(0.2)
            for features, labels in step:
                step.backward(F.cross_entropy(model(features), labels, reduction="none"))
            step.apply()
            if step.number % 2 and not step.again:
                halve(model, optimizer)
            set_off(run, folder, faults, f"behind {call}")
        run.evaluate(Samples(), mean_output)
        halve(model, optimizer)
        notes["calls"] += 1
        set_off(run, folder, faults, f"left {call}")
    return run.weights_sha256(), dict(notes)


def launch(folder: Path, faults: Faults, *, waits: bool = False, **options: Any) -> Any:
    folder.mkdir()
    chosen = {"strategy": "fsdp", "workers": 2, "shards": 2, "out": folder / "run", **options}
    started = partial(train, waits=waits)
    return paceline.launch(started, str(folder), faults, threads=1, device="cpu", **chosen)


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return launch(tmp_path_factory.mktemp("quiet") / "one", [], strategy="single", workers=1)[0]


@pytest.mark.parametrize(
    ("fault", "options"),
    [
        (("left 0", STEPS, 1, "kill"), {}),
        (("left 0", STEPS, 0, "kill"), {"peer_snapshots": 1, "snapshot_every": 1}),
        (("call 1", STEPS, 1, "kill"), {}),
        (("call 1", STEPS + 3, 1, "kill"), {"save_every": 2}),
        (("call 1", STEPS + 3, 0, "kill"), {"peer_snapshots": 1, "snapshot_every": 2}),
        (("end", 14, 1, "kill"), {"save_every": 7}),
        (("end", 14, 1, "kill"), {"peer_snapshots": 1, "snapshot_every": 7}),
        (("call 1", 14, 1, "kill"), {"save_every": 7}),
        (("left 1", STEPS + 17, 1, "kill"), {}),
        (("behind 1", STEPS + 1, 1, "kill"), {"save_every": STEPS + 1}),
        (("behind 1", STEPS + 1, 0, "kill"), {"save_every": STEPS + 1}),
    ],
    ids=[
        "between", "between, with copies", "first step of a call", "a checkpoint in the call", "a copy in the call",
        "at an epoch's end", "at an epoch's end, with copies", "behind an epoch's end", "behind the last call",
        "before a checkpoint that is due", "before one, the first",
    ],
)  # fmt: skip
def test_a_worker_killed_changes_nothing(
    fault: tuple[str, int, int, str], options: dict[str, Any], tmp_path: Path, quiet: Any
) -> None:
    results = launch(tmp_path / "run", [fault], **options)
    assert set(tmp_path.glob("run/fault-*"))
    check_same(results, quiet)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_who_joins_goes_by_what_was_written_between_the_calls(
    strategy: str, tmp_path: Path, quiet: Any
) -> None:
    fault = ("call 1", STEPS + 3, 1, "kill")
    results = launch(tmp_path / "run", [fault], strategy=strategy, save_every=2, waits=True)
    assert len(results) == 2
    check_same(results, quiet)


def check_same(results: Any, quiet: Any) -> None:
    assert {weights for weights, _ in results} == {quiet[0]}
    assert [notes for _, notes in results] == [quiet[1]] * len(results)


@pytest.mark.parametrize(("strategy", "rank"), [("ddp", 0), ("fsdp", 1)])
def test_an_exception_behind_the_last_step_of_a_call(
    strategy: str, rank: int, tmp_path: Path, quiet: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is retried, or ends the run where nobody is left to go on; it is no `break` that the others do not make."""
    results: Any = ()
    shown = ""
    try:
        results = launch(tmp_path / "run", [("behind 0", STEPS, rank, "raise")], strategy=strategy)
    except WorkerFailedError as error:
        shown = error.__notes__[0]
    assert {weights for weights, _ in results} <= {quiet[0]}
    assert "ValueError: a passing trouble" in shown + capfd.readouterr().err
