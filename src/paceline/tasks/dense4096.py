"""The smallest real task: one dense layer learns a noisy linear teacher from 4,096 samples.

32 steps an epoch of 128 samples: on 4 workers each takes 32, and 32 steps x 32 samples x 4 workers = 4,096.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from paceline.task import Loss, Task

FEATURES = 20
NOISE = 0.1
"""Standard deviation of what the teacher adds: no model gets below a mean squared error of NOISE ** 2."""


class Dense4096(Task):
    """4,096 samples of 20 features, one dense layer, plain SGD."""

    name = "dense4096"
    batch_size = 128
    shards = 8
    epochs = 2

    def __init__(self, lr: float = 0.05) -> None:
        self.lr = lr

    def model(self) -> nn.Module:
        """Make the one layer."""
        return nn.Linear(FEATURES, 1)

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Make plain SGD."""
        return torch.optim.SGD(model.parameters(), lr=self.lr)

    def train_data(self) -> TensorDataset:
        """Draw 4,096 samples and what the teacher says about them."""
        return _samples(4096, seed=1)

    def eval_data(self) -> TensorDataset:
        """Draw 512 samples the model has not seen, from the same teacher."""
        return _samples(512, seed=2)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        """Return the mean squared error; the metric is the same."""
        features, target = batch
        return Loss.mean(F.mse_loss(model(features), target, reduction="none"))


def _samples(count: int, *, seed: int) -> TensorDataset:
    teacher = torch.randn(FEATURES, 1, generator=torch.Generator().manual_seed(0))
    draw = torch.Generator().manual_seed(seed)
    features = torch.randn(count, FEATURES, generator=draw)
    noise = NOISE * torch.randn(count, 1, generator=draw)
    return TensorDataset(features, features @ teacher + noise)
