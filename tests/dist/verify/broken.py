"""Tasks that are broken on purpose, each in one way, and the sound one that they are made from."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from paceline import Loss, Mean, Task


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def features(samples: int = 22) -> Tensor:
    return torch.randn(samples, 6, generator=torch.Generator().manual_seed(1))


class Sound(Task):
    """Three classes from six features, with dropout; 22 samples in batches of 7, so that nothing divides."""

    batch_size = 7
    epochs = 5

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3))

    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.05)

    def train_data(self) -> Any:
        return TensorDataset(features(), features()[:, :3].argmax(1))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        return Loss.mean(F.cross_entropy(model(x), y, reduction="none"))


class MeanOfMeans(Sound):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        return Loss.from_mean(F.cross_entropy(model(x), y), 1)


class AveragedTwice(Sound):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        return Loss.mean(0.5 * F.cross_entropy(model(x), y).reshape(1))


class _Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        x = features()
        return iter(list(zip(x, x[:, :3].argmax(1), strict=True)))


class SameOrder(Sound):
    def train_data(self) -> Any:
        return _Stream()


class UnseededWeights(Sound):
    def model(self) -> nn.Module:
        model = super().model()
        with torch.no_grad():
            model[0].bias.fill_(int.from_bytes(os.urandom(2), "little") / 65536)
        return model


class WeightsOfRank(Sound):
    def model(self) -> nn.Module:
        torch.manual_seed(rank())
        return super().model()


class _SeededDropout(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(1000 + rank())
        return F.dropout(x, 0.5)


class SeedOfRank(Sound):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), _SeededDropout(), nn.Linear(8, 3))


class _Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.centre.mul_(0.9).add_(0.1 * x.mean(0))
        return x - self.centre


class OwnBuffer(Sound):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), _Counting(), nn.Linear(8, 3))


class _Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.centre = torch.zeros(8)

    def forward(self, x: Tensor) -> Tensor:
        self.centre = 0.9 * self.centre + 0.1 * x.detach().mean(0)
        return x - self.centre


class HiddenBuffer(Sound):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), _Remembering(), nn.Linear(8, 3))


class _Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.seldom = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        # The marked sample is in one shard only.
        return self.always(x) + (self.seldom(x) if bool((x[:, 0] > 1e3).any()) else 0.0)


class SometimesUnused(Sound):
    batch_size = 22

    def model(self) -> nn.Module:
        return _Sometimes()

    def train_data(self) -> Any:
        x = features()
        x[5, 0] = 2e3
        return TensorDataset(x, x[:, 1:4].argmax(1))


class DataOfRank(Sound):
    def train_data(self) -> Any:
        return TensorDataset(features() + rank(), features()[:, :3].argmax(1))


class LengthOfRank(Sound):
    def train_data(self) -> Any:
        x = features(22 - rank())
        return TensorDataset(x, x[:, :3].argmax(1))


class _Counter(Dataset[Any]):
    def __init__(self) -> None:
        self.count = itertools.count()

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> Any:
        x = features()[index]
        return x + 0.01 * next(self.count), x[:3].argmax()


class CountingItems(Sound):
    def train_data(self) -> Any:
        return _Counter()


class SetOrder(Sound):
    def train_data(self) -> Any:
        words = {f"sample-{number}" for number in range(22)}
        numbers = [int(word.removeprefix("sample-")) for word in words]
        return TensorDataset(features()[numbers], features()[:, :3].argmax(1))


class _ReadsRank(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (1.0 + 0.1 * (dist.get_rank() if dist.is_initialized() else 0))


class ModelOfRank(Sound):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), _ReadsRank(), nn.Linear(8, 3))


class _ReadsWorld(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (1.0 * int(os.environ.get("WORLD_SIZE", "1")))


class ModelOfWorld(Sound):
    """Each worker of a group computes the same, but another number of workers another thing: no probe knows that."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), _ReadsWorld(), nn.Linear(8, 3))


class Evaluated(Sound):
    def eval_data(self) -> Any:
        return self.train_data()

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Mean]:
        x, y = batch
        return {"accuracy": Mean((model(x).argmax(-1) == y).sum(), len(y))}


class ClippedInHook(Sound):
    def model(self) -> nn.Module:
        model = super().model()
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.001, 0.001))
        return model


class ClippedInLoss(Sound):
    micro_batch = 1

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.001)
        return super().loss(model, batch)


class ScheduleInLoss(Sound):
    def optimizer(self, model: nn.Module) -> Optimizer:
        made = super().optimizer(model)
        self.schedule = ExponentialLR(made, 0.9)
        made.step = _quiet(made)
        return made

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        self.schedule.step()
        return super().loss(model, batch)


def _quiet(optimizer: Optimizer) -> Any:
    """Let the schedule step first without torch's warning that the optimizer should."""
    optimizer._opt_called = True
    return optimizer.step


class _Put(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.zeros(8).put_(torch.tensor([0]), torch.tensor([1.0]))


class NoKernel(Sound):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), _Put(), nn.Linear(8, 3))


class _Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + int.from_bytes(os.urandom(2), "little") / 65536


class UnseededNoise(Sound):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), _Noise(), nn.Linear(8, 3))


class _Own(Dataset[Any]):
    """Hands out its own tensors, not copies."""

    def __init__(self) -> None:
        self.rows = list(features())

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> Any:
        return self.rows[index], self.rows[index][:3].argmax()


class ChangesItsBatch(Sound):
    def train_data(self) -> Any:
        return _Own()

    @staticmethod
    def collate(items: Any) -> Any:  # type: ignore[override]
        return items

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        for x, _ in batch:
            x.mul_(1.5)
        scores = model(torch.stack([x for x, _ in batch]))
        return Loss.mean(F.cross_entropy(scores, torch.stack([y for _, y in batch]), reduction="none"))


class Normalised(Sound):
    """Sound too: batch statistics and dropout, in batches that leave every shard two samples or more."""

    batch_size = 16

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3))


class Raises(Sound):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        raise KeyError("a fault of the user's own")
