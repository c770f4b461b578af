"""A task that says all that a task can: hooks, evaluations in mid-epoch, an early end, best checkpoints, predictions."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline
from paceline.training import trainer
from paceline.training.run import engine_of
from paceline.training.spec import TrainSpec
from paceline.world import fault_points

PEAK = 15
"""The step from which the score falls: three evaluations later, at step 30, the run ends."""


class Followed(paceline.Task):
    """61 samples in batches of 8: a short one ends every epoch, and no evaluation but one falls on the end of an epoch."""

    batch_size = 8
    epochs = 9
    max_grad_norm = 0.5
    eval_every = 5
    early_stopping = paceline.EarlyStopping("score", patience=3)
    keep_best = paceline.Best("score", k=2)
    average = paceline.Average(0.9, start=3)

    def __init__(self) -> None:
        self.log: dict[str, list[Any]] = {"steps": [], "epochs": [], "evals": []}
        self.committed: list[int] = []

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 3))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.02)

    def scheduler(self, optimizer: torch.optim.Optimizer, total_steps: int | None) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    def train_data(self) -> TensorDataset:
        features = torch.randn(61, 6, generator=torch.Generator().manual_seed(1))
        return TensorDataset(features, features[:, :3].argmax(1))

    def eval_data(self) -> TensorDataset:
        return TensorDataset(*self.train_data()[:45])

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> paceline.Loss:
        features, labels = batch
        return paceline.Loss.mean(F.cross_entropy(model(features), labels, reduction="none"))

    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, paceline.Mean]:
        features, labels = batch
        right = (model(features).argmax(1) == labels).sum()
        score = -abs(self.steps_done - PEAK)
        return {
            "accuracy": paceline.Mean(right, len(labels)),
            "score": paceline.Mean(score * len(labels), len(labels)),
        }

    def state(self) -> dict[str, Any]:
        return {"log": self.log}

    def on_step(self, info: paceline.StepInfo) -> None:
        drawn = torch.rand(()).item()  # from a stream of the step's own
        self.log["steps"].append(
            [info.number, info.epoch, info.loss, info.learning_rate, info.gradient_norm, info.samples, drawn]
        )

    def on_epoch(self, info: paceline.EpochInfo) -> None:
        self.log["epochs"].append([info.epoch, info.step, sorted(info.metrics.items())])

    def on_eval(self, info: paceline.EvalInfo) -> None:
        self.log["evals"].append([info.step, info.epoch, sorted(info.metrics.items()), info.is_best])

    def on_checkpoint(self, info: paceline.CheckpointInfo) -> None:
        assert (Path(info.path) / "manifest.json").is_file()
        self.committed.append(info.step)


class Writing(Followed):
    """Writes to the weights in a hook."""

    def model(self) -> nn.Module:
        self.made = super().model()
        return self.made

    def on_step(self, info: paceline.StepInfo) -> None:
        with torch.no_grad():
            next(self.made.parameters()).mul_(0.5)


class Replacing(Writing):
    """Puts a layer without weights in the place of another in a hook."""

    def on_step(self, info: paceline.StepInfo) -> None:
        if info.number == 2:
            self.made[1] = nn.ReLU()  # type: ignore[index,operator]


class Setting(Followed):
    """Sets an attribute that the run has taken over, in one of its methods."""

    def __init__(self, where: str, attribute: str, value: Any) -> None:
        super().__init__()
        self.where, self.attribute, self.value = where, attribute, value

    def reach(self, where: str) -> None:
        if where == self.where:
            setattr(self, self.attribute, self.value)

    def model(self) -> nn.Module:
        self.reach("model")
        return super().model()

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> paceline.Loss:
        self.reach("loss")
        return super().loss(model, batch)

    def on_step(self, info: paceline.StepInfo) -> None:
        self.reach("on_step")

    def on_epoch(self, info: paceline.EpochInfo) -> None:
        self.reach("on_epoch")


def work(
    run: paceline.Run, faults: list[tuple[str, int, int]], folder: str, **spec: Any
) -> tuple[dict[str, Any], dict[str, Any], list[int]]:
    """Train as `paceline train` does; each of the faults (point, step, rank) kills a worker once."""

    def trap(point: str) -> None:
        for one in faults:
            name, number, rank = one
            state = engine_of(run).state
            if point == name and state.position.number == number and run.world.rank == rank:
                try:
                    os.close(os.open(Path(folder) / f"{name}-{number}", os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    continue
                os.kill(os.getpid(), signal.SIGKILL)

    fault_points.set_fault(trap)
    try:
        task = spec.pop("task", "Followed")
        made = TrainSpec(task=f"{__name__}:{task}", name=task, **spec)
        result = trainer.main(run, made)
        trained: Any = engine_of(run).state.task
        return result, trained.log, trained.committed
    finally:
        fault_points.set_fault(None)


class Tied(paceline.Task):
    """A slow average of weights, two of which are one."""

    batch_size = 8
    epochs = 2
    average = paceline.Average(0.95)
    keep_best = paceline.Best("error", mode="min")
    points = torch.randn(40, 6, generator=torch.Generator().manual_seed(2))

    def model(self) -> nn.Module:
        """Return two layers that share their weight."""
        first, last = nn.Linear(6, 6), nn.Linear(6, 6)
        last.weight = first.weight
        return nn.Sequential(first, last)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return one that is quick."""
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def train_data(self) -> Tensor:
        """Return the points."""
        return self.points

    eval_data = train_data

    def loss(self, model: nn.Module, batch: Tensor) -> paceline.Loss:
        """Return how far they are from what they were."""
        return paceline.Loss.mean((model(batch) - batch).square().sum(1))

    def metrics(self, model: nn.Module, batch: Tensor) -> dict[str, paceline.Mean]:
        """Return the same."""
        return {"error": paceline.Mean((model(batch) - batch).square().sum(), len(batch))}
