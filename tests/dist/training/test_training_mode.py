"""The model of a task trains in training mode, whichever it came in; what it keeps frozen stays so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.task import Loss
from paceline.training.training_mode import WHOLE, enter_training_mode

HOW: dict[str, Any] = {"threads": 1, "progress": False}


class Freezing(nn.Sequential):
    """Keeps its BatchNorm in evaluation mode by itself, as models for detection do."""

    def train(self, mode: bool = True) -> Freezing:
        super().train(mode)
        self[1].eval()
        return self


class Modes(paceline.Task):
    batch_size, shards, epochs = 16, 4, 1

    def __init__(self, came: str = "training") -> None:
        self.came = came

    def model(self) -> nn.Module:
        kind = Freezing if self.came == "freezing" else nn.Sequential
        made = kind(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
        if self.came == "evaluating":
            made.eval()
        if self.came == "frozen":
            made[1].eval()
        return made

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def train_data(self) -> TensorDataset:
        x = torch.linspace(-1, 1, 192).reshape(48, 4)
        return TensorDataset(x, x.sum(1, keepdim=True))

    def eval_data(self) -> TensorDataset:
        return self.train_data()

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        return Loss.mean((model(batch[0]) - batch[1]).square().flatten())


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_model_that_comes_in_evaluation_mode_is_trained_as_any_other(strategy: str, tmp_path: Path) -> None:
    folders = {came: tmp_path / came for came in ("evaluating", "training")}
    came, plain = (
        paceline.train(Modes(came), workers=2, strategy=strategy, out=out, **HOW)
        for came, out in folders.items()
    )
    assert came.weights_sha256 == plain.weights_sha256
    told = [Path(out, "events.jsonl").read_text().count(WHOLE) for out in folders.values()]
    assert told == [1, 0]


@pytest.mark.parametrize("came", ["freezing", "frozen"])
def test_what_a_model_keeps_frozen_stays_frozen(came: str) -> None:
    alone = paceline.train(Modes(came), strategy="single", **HOW)
    both = paceline.train(Modes(came), workers=2, strategy="ddp", **HOW)
    assert alone.weights_sha256 == both.weights_sha256
    statistics = alone.model()[1].running_mean
    assert torch.equal(statistics, torch.zeros(8))


def test_a_body_that_stays_in_evaluation_mode_is_told_of() -> None:
    body = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).eval()
    model = nn.Sequential(body, nn.BatchNorm1d(4).eval(), nn.Linear(4, 1))
    assert "0 came in evaluation mode, as from_pretrained leaves it, and stays so" in enter_training_mode(
        model
    )
    assert [one.training for one in (model, body, model[1])] == [True, False, False]
    body.requires_grad_(False)
    assert not enter_training_mode(model)
