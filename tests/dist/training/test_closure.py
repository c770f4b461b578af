"""LBFGS: it evaluates the loss several times a step, each time over the whole global batch, to the same bits on any workers."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import LBFGS
from torch.utils.data import TensorDataset

import paceline
from paceline.world import fault_points


def points() -> TensorDataset:
    made = torch.Generator().manual_seed(1)
    x = torch.randn(40, 3, generator=made)
    return TensorDataset(x, x.sum(1, keepdim=True).tanh())


def loss(model: nn.Module, batch: list[torch.Tensor]) -> paceline.Loss:
    return paceline.Loss.mean((model(batch[0]) - batch[1]).square().flatten())


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Dropout(0.1), nn.Tanh(), nn.Linear(6, 1))


def make(model: nn.Module) -> LBFGS:
    return LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=3, line_search_fn="strong_wolfe")


def train(run: paceline.Run, folder: str, victim: int | None, steps: int) -> tuple[str, list[float]]:
    run.prepare(network, make)
    mark, passes = Path(folder) / "killed", 0

    def trap(point: str) -> None:
        nonlocal passes
        passes += point == fault_points.FORWARD
        if passes == 14 and run.world.rank == victim and not mark.exists():  # in the middle of a line search
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    if victim is not None:
        fault_points.set_fault(trap)
    losses = {}
    for step in run.steps(points(), batch_size=20, steps=steps):
        result = step.compute(loss)
        if not result.again:
            losses[step.number] = result.loss
    return run.weights_sha256(), list(losses.values())


def launch(folder: Path, steps: int = 6, victim: int | None = None, **options: Any) -> Any:
    folder.mkdir(exist_ok=True)
    found = paceline.launch(
        train, str(folder), victim, steps, shards=4, threads=1, device="cpu", out=folder / "run", **options
    )
    assert len({weights for weights, _ in found}) == 1
    return found[0]


def test_the_bits_are_the_same_on_any_number_of_workers_and_after_a_fault(tmp_path: Path) -> None:
    weights, losses = launch(tmp_path / "one", strategy="single", workers=1)
    assert losses[-1] < 0.5 * losses[0]
    again, _ = launch(tmp_path / "killed", victim=1, strategy="ddp", workers=3)
    assert again == weights
    assert (tmp_path / "killed" / "killed").exists()
    events = (tmp_path / "killed" / "run" / "events.jsonl").read_text().splitlines()
    assert [json.loads(one)["kind"] for one in events].count("run_started") == 1, "the others did not go on"
    launch(tmp_path / "half", steps=3, strategy="ddp", workers=2)
    resumed = launch(tmp_path / "half", steps=6, strategy="dp", workers=2, resume=True)
    assert resumed == (weights, losses[3:])


def test_where_no_worker_has_all_of_the_state_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(paceline.InputError, match=r"LBFGS computes the loss several times.*Use .*ddp"):
        launch(tmp_path, strategy="fsdp", workers=2)


def pieces(run: paceline.Run) -> None:
    model, _ = run.prepare(network, make)
    for step in run.steps(points(), batch_size=20, steps=1):
        for x, y in step:
            step.backward((model(x) - y).square().flatten())


def test_a_loop_that_takes_the_passes_itself_is_told_how() -> None:
    with pytest.raises(paceline.InputError, match=r"call step\.compute\(loss\)"):
        paceline.launch(pieces, device="cpu")
