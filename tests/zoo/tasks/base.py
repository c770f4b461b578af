"""What the tasks of the zoo have in common: few samples, small models, 22 samples in batches of 8."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from paceline import Loss, Mean, Task

FEATURES, CLASSES, WORDS, LENGTH = 6, 3, 11, 5
SAMPLES, HELD_OUT = 22, 13
IGNORED = -100


def drawn(seed: int) -> torch.Generator:
    """Return a source of random numbers of its own."""
    return torch.Generator().manual_seed(seed)


class Small(Task):
    """Three classes from six features."""

    batch_size = 8
    epochs = 3
    samples = SAMPLES

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, CLASSES))

    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    def train_data(self) -> Any:
        return self.data(self.samples, 1)

    def eval_data(self) -> Any:
        return self.data(HELD_OUT, 2)

    def data(self, samples: int, seed: int) -> Any:
        features = torch.randn(samples, FEATURES, generator=drawn(seed))
        return TensorDataset(features, features[:, :CLASSES].argmax(1))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        features, labels = batch
        return Loss.mean(F.cross_entropy(model(features), labels, reduction="none"))


class Steady(Small):
    """Under Adam a parameter whose true gradient is zero (a bias before a norm) makes full steps of mere rounding."""

    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class Words(Small):
    """Sentences of five words, each word to be followed by the next."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(WORDS, 12), nn.Tanh(), nn.Linear(12, WORDS))

    def data(self, samples: int, seed: int) -> Any:
        words = torch.randint(WORDS, (samples, LENGTH), generator=drawn(seed))
        lengths = torch.randint(1, LENGTH + 1, (samples, 1), generator=drawn(seed + 10))
        return TensorDataset(
            words, torch.where(torch.arange(LENGTH) < lengths, (words * 3 + 1) % WORDS, IGNORED)
        )

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        words, targets = batch
        return Loss.tokens(model(words), targets)


def measured(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Mean]:
    """Measure a classifier: for loops of their own."""
    features, labels = batch
    return {"loss": Mean(F.cross_entropy(model(features), labels, reduction="sum"), len(labels))}
