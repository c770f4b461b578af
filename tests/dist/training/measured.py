"""A loop that measures more than means and predicts, and what it does on one worker of several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline

SAMPLES = 83
"""Which no batch size and no number of shards divides."""


class Confusion:
    """How often each class was taken for each, and a sum that depends on the order of its additions."""

    def __init__(self, preds: Tensor, targets: Tensor, scores: Tensor) -> None:
        self.table = torch.bincount(targets * 3 + preds, minlength=9).reshape(3, 3)
        self.total = scores.sum()
        self.first = [float(scores[0])] if len(scores) else []

    def merge(self, other: Confusion) -> None:
        self.table = self.table + other.table
        self.total = self.total + other.total
        self.first += other.first

    def compute(self) -> dict[str, Any]:
        recall = self.table.diagonal() / self.table.sum(1)
        order = sum(place * value for place, value in enumerate(self.first))
        return {"recall": recall, "total": self.total, "order": order}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 3))


def data() -> TensorDataset:
    features = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(features, features[:, :3].argmax(1), torch.arange(SAMPLES))


def metrics(model: nn.Module, batch: Any) -> dict[str, Any]:
    features, targets, numbers = batch
    scores = model(features)
    found: dict[str, Any] = {
        "accuracy": paceline.Mean((scores.argmax(1) == targets).sum(), len(targets)),
        "confusion": Confusion(scores.argmax(1), targets, scores[:, 0]),
        "all": paceline.Collected(scores, numbers, compute=look),
    }
    try:
        from torchmetrics.classification import BinaryAUROC, MulticlassF1Score
    except ImportError:
        return found
    f1 = MulticlassF1Score(3)
    f1.update(scores, targets)
    area = BinaryAUROC()  # keeps all values, one batch after another
    area.update(scores.softmax(1)[:, 0], (targets == 0).long())
    return {**found, "f1": f1, "area": area}


def look(scores: Tensor, numbers: Tensor) -> dict[str, Any]:
    """Check that all values are there, in the order of the samples."""
    return {
        "in order": int(torch.equal(numbers, torch.arange(SAMPLES))),
        "last": scores[-1],
        "sum": scores.cumsum(0)[-1, 0],
    }


def outputs(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    features, _, numbers = batch
    return {"scores": model(features), "number": numbers}


def loop(run: paceline.Run, out: str) -> dict[str, Any]:
    """Train a few steps, measure, predict into memory and into files."""
    run.prepare(model, lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    for step in run.steps(data(), batch_size=8, steps=3):
        step.compute(lambda model, batch: paceline.Loss.mean((model(batch[0]) ** 2).sum(1)))
    measured = run.evaluate(data(), metrics, batch_size=7)
    predicted = run.predict(data(), outputs, batch_size=7)
    several = run.predict(data(), outputs, batch_size=7, out=Path(out) / "deep" / "several.safetensors")
    one = run.predict(data(), lambda model, batch: model(batch[0]), batch_size=7, out=f"{out}/one.npy")
    return {"measured": measured, "predicted": predicted, "rows": (several, one)}
