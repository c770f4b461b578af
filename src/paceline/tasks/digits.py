"""Handwritten digits: a small convolutional network on the 1,797 real 8 x 8 images that scikit-learn ships.

The images are read from scikit-learn's installed files without importing it, which would take seconds.
"""

from __future__ import annotations

import gzip
import importlib.util
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import TensorDataset

from paceline.errors import InputError
from paceline.task import Loss, Mean, Task
from paceline.tasks.schedule import warmup_cosine

TRAIN = 1437
"""Images to train on; the other 360 are for evaluation."""


class Digits(Task):
    """Ten classes, 1,437 images to learn from, 360 to be measured on."""

    name = "digits"
    batch_size = 64
    shards = 8
    epochs = 10

    def __init__(self, lr: float = 4e-3, width: int = 32) -> None:
        self.lr = lr
        self.width = width

    def model(self) -> nn.Module:
        """Make three convolutions and a dense layer; no batch statistics, so a sample's answer is its own."""
        width = self.width
        return nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(8 * width, 10),
        )

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Make AdamW."""
        return torch.optim.AdamW(model.parameters(), lr=self.lr, weight_decay=0.01)

    def scheduler(self, optimizer: Optimizer, total_steps: int | None) -> LRScheduler | None:
        """Warm up, then fall to zero along a cosine."""
        return warmup_cosine(optimizer, total_steps)

    def train_data(self) -> TensorDataset:
        """Return 1,437 images of shape (1, 8, 8) in 0..1 and their labels."""
        images, labels = _shuffled()
        return TensorDataset(images[:TRAIN], labels[:TRAIN])

    def eval_data(self) -> TensorDataset:
        """Return the other 360."""
        images, labels = _shuffled()
        return TensorDataset(images[TRAIN:], labels[TRAIN:])

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        """Return the mean cross-entropy."""
        images, labels = batch
        return Loss.mean(F.cross_entropy(model(images), labels, reduction="none"))

    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Mean]:
        """Measure accuracy and loss."""
        images, labels = batch
        scores = model(images)
        loss = F.cross_entropy(scores, labels, reduction="sum")
        right = (scores.argmax(-1) == labels).sum()
        return {"accuracy": Mean(right, len(labels)), "loss": Mean(loss, len(labels))}


def read_digits() -> tuple[Tensor, Tensor]:
    """Read the images, shape (1797, 8, 8) with values 0..16, and their labels, in the file's order."""
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise InputError(
            "the task digits needs scikit-learn's data files, and scikit-learn is not installed. "
            'Run: pip install "paceline[data]"'
        )
    path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if not path.exists():
        raise InputError(
            f"the task digits needs {path}, which this scikit-learn does not ship. "
            'Run: pip install --force-reinstall "paceline[data]"'
        )
    # The file is plain rows of 65 small integers; one split of the whole is 20 times faster than loadtxt.
    numbers = gzip.decompress(path.read_bytes()).replace(b"\n", b",").rstrip(b",").split(b",")
    table = torch.from_numpy(np.array(numbers, dtype=np.float32).reshape(-1, 65))
    return table[:, :64].reshape(-1, 8, 8), table[:, 64].long()


@cache
def _shuffled() -> tuple[Tensor, Tensor]:
    # The file is ordered by writer, so the split is drawn once from a seed of its own.
    images, labels = read_digits()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return images[order].unsqueeze(1) / 16.0, labels[order]
