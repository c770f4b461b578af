"""A stream that splits itself by rank is refused in one line: paceline deals a stream out, and would train on parts of parts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.utils.data import IterableDataset, TensorDataset

import paceline
from paceline.errors import InputError
from paceline.training import trainer
from paceline.training.spec import TrainSpec

Pair = tuple[Tensor, Tensor]


class Numbers(IterableDataset[Pair]):
    """As IterableDatasets are often written for DDP, by one of two ways to know the rank; or whole."""

    def __init__(self, items: int, splits: str) -> None:
        self.items, self.splits = items, splits

    def __iter__(self) -> Iterator[Pair]:
        rank, workers = 0, 1
        if self.splits == "torch":
            rank, workers = distributed.get_rank(), distributed.get_world_size()
        elif self.splits == "environment":
            rank, workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        for number in range(rank, self.items, workers):
            features = torch.full((4,), number / self.items) + 0.1 * torch.randn(4)
            yield features, features.sum().unsqueeze(0)


def losses(model: nn.Module, batch: Pair) -> Tensor:
    return (model(batch[0]) - batch[1]).square().flatten()


def metrics(model: nn.Module, batch: Pair) -> dict[str, paceline.Mean]:
    found = losses(model, batch)
    return {"loss": paceline.Mean(found.sum(), len(found))}


class Fit(paceline.Task):
    """Trains on a stream and measures on one."""

    batch_size, shards, epochs = 8, 4, 2

    def __init__(self, trains: str = "", measures: str = "") -> None:
        self.trains, self.measures = trains, measures

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01)

    def train_data(self) -> Any:
        return Numbers(80, self.trains)

    def eval_data(self) -> Any:
        return Numbers(50, self.measures)

    def loss(self, model: nn.Module, batch: Pair) -> paceline.Loss:
        return paceline.Loss.mean(losses(model, batch))

    def metrics(self, model: nn.Module, batch: Pair) -> dict[str, paceline.Mean]:
        return metrics(model, batch)


def loop(run: paceline.Run, items: int, splits: str) -> float:
    """Train in a loop of one's own, first on what can be indexed."""
    task = Fit()
    model = task.model()
    model, _ = run.prepare(model, task.optimizer(model))
    found = 0.0
    for data in (TensorDataset(torch.zeros(8, 4), torch.zeros(8, 1)), Numbers(items, splits)):
        for step in run.steps(data, batch_size=8, epochs=1):
            for batch in step:
                step.backward(losses(model, batch))
            found = step.apply().loss
    return found


def measure(run: paceline.Run, splits: str) -> dict[str, float]:
    """Evaluate a stream, and nothing else."""
    task = Fit()
    model = task.model()
    run.prepare(model, task.optimizer(model))
    return run.evaluate(Numbers(50, splits), metrics, batch_size=8)


OPTIONS: dict[str, Any] = {"workers": 2, "threads": 1, "device": "cpu", "shards": 4}


@pytest.mark.parametrize(
    ("strategy", "items", "splits", "num_workers"),
    [
        ("ddp", 80, "torch", 0),
        ("ddp", 53, "environment", 1),
        ("fsdp", 80, "environment", 0),
        ("ps", 53, "torch", 0),
        ("local-sgd", 80, "torch", 1),
    ],
)
def test_a_loop_of_ones_own_is_refused_a_stream_split_by_rank(
    strategy: str, items: int, splits: str, num_workers: int
) -> None:
    with pytest.raises(InputError, match=r"the training stream gives other items on rank . than on rank ."):
        paceline.launch(loop, items, splits, strategy=strategy, num_workers=num_workers, **OPTIONS)


@pytest.mark.parametrize(
    ("strategy", "which", "splits"),
    [
        ("ddp", "training", {"trains": "torch"}),
        ("tp", "training", {"trains": "environment"}),
        ("pp", "training", {"trains": "torch"}),
        ("fsdp", "evaluation", {"measures": "torch"}),
        ("ps", "evaluation", {"measures": "environment"}),
    ],
)
def test_a_task_is_refused_a_stream_split_by_rank(strategy: str, which: str, splits: dict[str, str]) -> None:
    spec = TrainSpec(task=f"{__name__}:Fit", name="fit", settings=splits)
    with pytest.raises(InputError, match=rf"the {which} stream gives other items on rank . than on rank ."):
        paceline.launch(trainer.main, spec, strategy=strategy, **OPTIONS)


def test_an_evaluation_of_ones_own_is_refused_a_stream_split_by_rank() -> None:
    with pytest.raises(InputError, match="the evaluation stream gives other items on rank"):
        paceline.launch(measure, "torch", strategy="ddp", **OPTIONS)


def test_a_whole_stream_that_draws_is_the_same_on_all_workers() -> None:
    (alone,) = paceline.launch(loop, 53, "", **OPTIONS | {"workers": 1})
    assert set(paceline.launch(loop, 53, "", strategy="ddp", num_workers=1, **OPTIONS)) == {alone}
