"""Workers whose data sets differ are refused in one line: each reads samples of its own, and some would be lost or repeated."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import InputError
from paceline.training import trainer
from paceline.training.spec import TrainSpec

OPTIONS: dict[str, Any] = {"workers": 2, "threads": 1, "device": "cpu", "shards": 4}


def numbers(turned: bool, cut: bool) -> TensorDataset:
    """Return a data set that another worker has in another order, or not all of."""
    mine = os.environ["RANK"] != "0"
    order = range(63, -1, -1) if turned and mine else range(64 - 4 * (cut and mine))
    x = torch.tensor([[one / 64] * 4 for one in order])
    return TensorDataset(x, x.sum(1, keepdim=True))


class Fit(paceline.Task):
    """Trains on a data set and measures on one."""

    batch_size, shards, epochs = 16, 4, 1

    def __init__(self, turned: str = "", cut: str = "") -> None:
        self.turned, self.cut = turned, cut

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01)

    def train_data(self) -> Any:
        return numbers(self.turned == "training", self.cut == "training")

    def eval_data(self) -> Any:
        return numbers(self.turned == "evaluation", self.cut == "evaluation")

    def loss(self, model: nn.Module, batch: Any) -> paceline.Loss:
        return paceline.Loss.mean((model(batch[0]) - batch[1]).square().flatten())

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, paceline.Mean]:
        return {"loss": paceline.Mean((model(batch[0]) - batch[1]).square().sum(), len(batch[0]))}


@pytest.mark.parametrize(
    ("strategy", "settings", "num_workers", "said"),
    [
        ("ddp", {"turned": "training"}, 0, "the training data gives other samples on rank . than on rank ."),
        ("fsdp", {"turned": "training"}, 1, "the training data gives other samples on rank"),
        ("pp", {"turned": "evaluation"}, 0, "the evaluation data gives other samples on rank"),
        ("ddp", {"cut": "training"}, 0, "the training data has 6. samples on rank . and 6. on rank ."),
        ("fsdp", {"cut": "evaluation"}, 0, "the evaluation data has 6. samples on rank"),
    ],
)
def test_data_sets_that_differ_by_worker_are_refused(
    strategy: str, settings: dict[str, str], num_workers: int, said: str
) -> None:
    spec = TrainSpec(task=f"{__name__}:Fit", name="fit", settings=settings)
    with pytest.raises(InputError, match=said):
        paceline.launch(trainer.main, spec, strategy=strategy, num_workers=num_workers, **OPTIONS)


def predict(run: paceline.Run) -> Any:
    """Predict, and nothing else."""
    task = Fit()
    model = task.model()
    run.prepare(model, task.optimizer(model))
    return run.predict(numbers(turned=True, cut=False), lambda model, batch: model(batch[0]), batch_size=16)


def test_so_is_what_differs_in_a_prediction() -> None:
    with pytest.raises(InputError, match="the evaluation data gives other samples on rank"):
        paceline.launch(predict, strategy="ddp", **OPTIONS)
