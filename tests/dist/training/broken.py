"""Tasks that go wrong, each in one way; workers import them from here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import paceline
from paceline import Loss
from paceline.errors import NonFiniteLossError
from tests.contract.tasks import FEATURES, Balanced, Classify

POISON = 55
"""The sample that spoils its batch."""


class Numbered(Classify):
    """Classify with the number of each sample beside it."""

    def train_data(self) -> TensorDataset:
        return TensorDataset(*super().train_data().tensors, torch.arange(self.samples))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return super().loss(model, batch[:2])


class NotANumber(Numbered):
    """One sample makes the loss NaN."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        loss = super().loss(model, batch)
        return Loss(loss.total * torch.where((batch[2] == POISON).any(), torch.nan, 1.0), loss.weight)


class InfiniteTerm(Balanced):
    """The auxiliary term grows beyond all bounds."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        loss = super().loss(model, batch)
        loss.auxiliary["size"] = Loss(loss.auxiliary["size"].total * torch.inf, 1)
        return loss


class WithoutWeight(Classify):
    """No item counts for anything."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        return Loss(super().loss(model, batch).total, 0)


class _Failing(Dataset[tuple[Tensor, int]]):
    def __len__(self) -> int:
        return 61

    def __getitem__(self, sample: int) -> tuple[Tensor, int]:
        if sample == POISON:
            raise KeyError("the picture is torn")
        return torch.ones(FEATURES), 0


class TornPicture(Classify):
    """One sample cannot be read."""

    def train_data(self) -> Any:
        return _Failing()


class BareTensor(Classify):
    """The loss is a mean already."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Any:
        return super().loss(model, batch).total / 8


class BareTensorLater(BareTensor):
    """The loss is a Loss for five steps only."""

    calls = 0

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Any:
        self.calls += 1
        return Classify.loss(self, model, batch) if self.calls <= 5 else super().loss(model, batch)


class Frozen(Classify):
    """Nothing can be learned."""

    def model(self) -> nn.Module:
        return super().model().requires_grad_(False)


class Empty(Classify):
    """No sample at all."""

    def train_data(self) -> TensorDataset:
        return TensorDataset(torch.empty(0, FEATURES), torch.empty(0, dtype=torch.long))


class Wider(Classify):
    """Another model than Classify's: other shapes and one more layer."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(FEATURES, 20), nn.Tanh(), nn.Dropout(0.3), nn.Linear(20, 3), nn.Linear(3, 3)
        )


def caught(run: paceline.Run) -> tuple[str, bool, int]:
    """Train NotANumber until it stops; say why, whether the weights are as before that step, and where it stopped."""
    task = NotANumber()
    model = task.model()
    model, _ = run.prepare(model, task.optimizer(model))
    before: dict[str, Tensor] = {}
    try:
        for step in run.steps(task.train_data(), batch_size=8, steps=8):
            before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            for batch in step:
                step.backward(task.loss(model, batch))
            step.apply()
    except NonFiniteLossError as error:
        untouched = all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
        return str(error), untouched, run._engine.state.position.number
    raise AssertionError("the loss should have been NaN")
