"""The learning rate that is reported of a step is the one that it was taken with, whoever steps the schedule."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

import paceline

DATA = TensorDataset(torch.randn(32, 3, generator=torch.Generator().manual_seed(0)))
RATES = [0.1, 0.2, 0.4, 0.8]


def double(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 2.0**step)


class Warming(paceline.Task):
    batch_size = 8
    shards = 2

    def __init__(self, told: str = "") -> None:
        self.told = told

    def model(self) -> nn.Module:
        return nn.Linear(3, 1)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def scheduler(self, optimizer: torch.optim.Optimizer, total_steps: int | None) -> Any:
        return double(optimizer)

    def train_data(self) -> TensorDataset:
        return DATA

    def loss(self, model: nn.Module, batch: list[Tensor]) -> paceline.Loss:
        return paceline.Loss.mean(model(batch[0]).square().flatten())

    def on_step(self, info: paceline.StepInfo) -> None:
        with Path(self.told).open("a") as file:
            print(info.learning_rate, file=file)


def loop(run: paceline.Run, kind: str) -> None:
    net = nn.Linear(3, 1)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    schedule = None
    if kind == "run":
        model, optimizer = run.prepare(net, optimizer, scheduler=double)
    elif kind == "loop":
        model, optimizer, schedule = run.prepare(net, optimizer, double(optimizer))
    else:
        model, optimizer = run.prepare(net, optimizer)
    for step in run.steps(DATA, batch_size=8, epochs=1):
        for (x,) in step:
            step.backward(model(x).square().flatten())
        if kind == "hand":
            optimizer.param_groups[0]["lr"] = RATES[step.number]
        optimizer.step()
        if schedule is not None:
            schedule.step()


def reported(folder: Path) -> list[float]:
    lines = (json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines())
    return [line["learning_rate"] for line in lines if line["kind"] == "step"]


@pytest.mark.parametrize("kind", ["run", "loop", "hand"])
def test_a_loop_reports_the_rate_of_the_step(tmp_path: Path, kind: str) -> None:
    paceline.launch(loop, kind, workers=2, out=tmp_path / "run")
    assert reported(tmp_path / "run") == RATES


def test_a_task_reports_the_rate_of_the_step(tmp_path: Path) -> None:
    result = paceline.train(
        Warming, settings={"told": str(tmp_path / "told")}, workers=1, out=tmp_path / "run", progress=False
    )
    assert reported(tmp_path / "run") == RATES
    assert list(result.history.learning_rate.values()) == RATES
    assert [float(line) for line in (tmp_path / "told").read_text().split()] == RATES
