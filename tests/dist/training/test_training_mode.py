"""The model of a task trains in training mode, whichever it came in; what it keeps frozen stays so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.task import Loss
from paceline.training.training_mode import WHOLE, TrainingMode

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


def told(model: nn.Module, optimized: list[nn.Module] | None = None) -> str:
    mode = TrainingMode()
    mode.enter(model)
    weights = [one for part in optimized or [model] for one in part.parameters()]
    return mode.note(model, torch.optim.SGD(weights, lr=0.1))


class OfTheUsers(nn.Module):
    """A layer of the user's, with a weight, that asks for its mode in a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.mixed(self.layer(x))

    def mixed(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5, self.training)


class Upwards(OfTheUsers):
    @torch.autocast("cpu")
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Helped(OfTheUsers):
    def mixed(self, x: Tensor) -> Tensor:
        return thinned(self, x)


def thinned(module: nn.Module, x: Tensor) -> Tensor:
    return nn.functional.dropout(x, 0.5, module.training)


class Plain(OfTheUsers):
    def mixed(self, x: Tensor) -> Tensor:
        return nn.functional.relu(x)


ACCIDENTS: dict[str, Callable[[], nn.Module]] = {
    "Dropout": lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)),
    "BatchNorm1d": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
    "MultiheadAttention": lambda: nn.TransformerEncoderLayer(4, 2, 8),
    "GRU": lambda: nn.ModuleDict({"rnn": nn.GRU(4, 4, 2, dropout=0.1)}),
    "OfTheUsers": OfTheUsers,
    "Upwards": Upwards,
    "Helped": Helped,
}
PURPOSES: dict[str, Callable[[], nn.Module]] = {
    "nothing depends on the mode": lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.LayerNorm(4)),
    "dropout of nothing": lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0)),
    "without statistics": lambda: nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False)
    ),
    "normalisation alone": lambda: nn.Sequential(nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.1)),
    "a layer alone": lambda: nn.BatchNorm1d(4),
    "code that does not ask": Plain,
}


@pytest.mark.parametrize("kind", ACCIDENTS)
def test_a_body_that_stays_in_evaluation_mode_is_told_of(kind: str) -> None:
    body = ACCIDENTS[kind]().eval()
    model = nn.Sequential(body, nn.BatchNorm1d(4).eval(), nn.Linear(4, 1))
    text = told(model)
    assert "0 came in evaluation mode, as from_pretrained leaves it, and stays so" in text
    assert kind in text
    assert [one.training for one in (model, body, model[1])] == [True, False, False]
    assert not told(model, [model[2]])  # a teacher: no optimizer has its weights
    body.requires_grad_(False)
    assert not told(model)


@pytest.mark.parametrize("why", PURPOSES)
def test_a_body_that_is_frozen_on_purpose_is_not_told_of(why: str) -> None:
    assert not told(nn.Sequential(PURPOSES[why]().eval(), nn.Linear(4, 1)))


def test_of_a_model_in_which_nothing_depends_on_the_mode_nothing_is_told() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    assert not told(model)
    assert model.training


def test_a_train_of_its_own_switches_nothing_on_that_the_task_switched_off() -> None:
    model = Freezing(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), ACCIDENTS["Dropout"]())
    model[2].eval()
    assert not told(model)
    assert [one.training for one in model] == [True, False, False, True]
    model[3].eval()
    assert told(model).startswith("3 came in evaluation mode")


def test_what_a_train_of_its_own_keeps_frozen_is_not_told_of() -> None:
    model = Freezing(nn.Linear(4, 4), ACCIDENTS["Dropout"]().eval(), nn.Linear(4, 1))
    assert not told(model)
    assert not model[1].training


def test_an_outer_train_has_the_last_word() -> None:
    class Outer(nn.Sequential):
        def train(self, mode: bool = True) -> Outer:
            super().train(mode)
            self[0][2].eval()
            return self

    model = Outer(Freezing(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)))
    told(model)
    assert not model[0][2].training
