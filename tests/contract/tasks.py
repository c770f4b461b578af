"""Small tasks, each made to hurt in one way: dropout, tokens of unequal number, auxiliary terms, a schedule."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import TensorDataset

from paceline import Loss, Mean, Task

FEATURES, CLASSES, WORDS, LENGTH = 6, 3, 7, 9
PADDING = -100
LEARNING_RATE = 0.05
ADAM_EPSILON = 0.05
"""As large as the learning rate, so that AdamW moves a weight by at most the gradient: see `distance.bound`."""
MOMENTUM = 0.9


def drawn(seed: int) -> torch.Generator:
    """Give a source of random numbers of its own, so that no test disturbs another."""
    return torch.Generator().manual_seed(seed)


class Classify(Task):
    """Three classes from six features, with dropout."""

    batch_size = 8
    epochs = 50

    def __init__(
        self,
        samples: int = 61,
        optimizer: str = "adamw",
        dropout: float = 0.3,
        max_grad_norm: float = 0.0,
        measured: bool = True,
    ) -> None:
        self.samples = samples
        self.measured = measured
        self.kind = optimizer
        self.dropout = dropout
        self.max_grad_norm = max_grad_norm or None

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(FEATURES, 16), nn.Tanh(), nn.Dropout(self.dropout), nn.Linear(16, CLASSES)
        )

    def optimizer(self, model: nn.Module) -> Optimizer:
        if self.kind == "adamw":
            return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=ADAM_EPSILON)
        if self.kind == "momentum":
            return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
        return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

    def train_data(self) -> TensorDataset:
        features = torch.randn(self.samples, FEATURES, generator=drawn(1))
        return TensorDataset(features, features[:, :CLASSES].argmax(1))

    def eval_data(self) -> TensorDataset | None:
        if not self.measured:
            return None
        features = torch.randn(103, FEATURES, generator=drawn(2))
        return TensorDataset(features, features[:, :CLASSES].argmax(1), torch.arange(103))

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        features, labels = batch
        return Loss.mean(F.cross_entropy(model(features), labels, reduction="none"))

    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> dict[str, Mean]:
        """Measure, and count: over a weight that is 1 in all, a mean is the sum over all samples."""
        features, labels, numbers = batch
        scores = model(features)
        first = (numbers == 0).sum()
        return {
            "loss": Mean(F.cross_entropy(scores, labels, reduction="sum"), len(labels)),
            "accuracy": Mean((scores.argmax(1) == labels).sum(), len(labels)),
            "samples": Mean(len(labels), first),
            "sum of numbers": Mean(numbers.sum(), first),
        }


class Scheduled(Classify):
    """The same under a schedule that is never twice at the same learning rate."""

    def scheduler(self, optimizer: Optimizer, total_steps: int | None) -> LRScheduler:
        return LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


class Tokens(Task):
    """Sentences of one to nine words: the weight of a batch is its words, and has little to do with its size."""

    batch_size = 8
    epochs = 50

    def __init__(self, samples: int = 30, lr: float = LEARNING_RATE) -> None:
        self.samples = samples
        self.lr = lr

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(WORDS, 12), nn.Tanh(), nn.Linear(12, WORDS))

    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.SGD(model.parameters(), lr=self.lr)

    def train_data(self) -> TensorDataset:
        words = torch.randint(WORDS, (self.samples, LENGTH), generator=drawn(3))
        lengths = torch.randint(1, LENGTH + 1, (self.samples, 1), generator=drawn(4))
        return TensorDataset(
            words, torch.where(torch.arange(LENGTH) < lengths, (words * 3 + 1) % WORDS, PADDING)
        )

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        words, targets = batch
        return Loss.tokens(model(words), targets)


class Balanced(Tokens):
    """Tokens with two auxiliary terms, each a mean over items of its own kind."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        words, targets = batch
        scores = model(words)
        size = Loss(0.1 * scores.square().sum(), scores.numel())
        # A sum over all words, in the measure of a few: its weight has little to do with its items.
        rare = Loss(0.3 * scores.abs().sum() / WORDS, (words == 0).sum() + 0.5 * len(words))
        return Loss.tokens(scores, targets, size=size, rare=rare)
