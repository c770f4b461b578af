"""A small task in a module of its own, which workers import by its name."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline

POINTS = torch.randn(112, 4, generator=torch.Generator().manual_seed(0))


class Lines(paceline.Task):
    """A linear teacher, with dropout so that a stream of random numbers counts."""

    batch_size = 32
    shards = 4

    def __init__(self, lr: float = 0.1, width: int = 8):
        self.lr, self.width = lr, width

    def model(self):
        return nn.Sequential(
            nn.Linear(4, self.width), nn.Dropout(0.1), nn.BatchNorm1d(self.width), nn.Linear(self.width, 1)
        )

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=self.lr)

    def train_data(self):
        return TensorDataset(POINTS, POINTS.sum(1, keepdim=True))

    def eval_data(self):
        return TensorDataset(POINTS[:50], POINTS[:50].sum(1, keepdim=True))

    def loss(self, model, batch):
        x, y = batch
        return paceline.Loss.mean((model(x) - y).square().flatten())


class Stubborn(Lines):
    """One whose code fails."""

    def loss(self, model, batch):
        raise RuntimeError("will not")
