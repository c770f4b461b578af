"""What parameters can be: tied, frozen, unused, in groups, of odd shapes and types."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.zoo.exhibits import exhibit
from tests.zoo.tasks.base import CLASSES, FEATURES, WORDS, Small, Words

NO_SPARSE = {"hybrid": "keeps embeddings with sparse=True on servers, and the model has none"}
NO_ROW = {"pp": "finds no row of layers"}


@exhibit("plain", "a small classifier with dropout", refused_by=NO_SPARSE, meshes=True)
class Plain(Small):
    """Nothing special."""


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.middle = nn.Embedding(WORDS, 12), nn.Linear(12, 12)
        self.head = nn.Linear(12, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.head(torch.relu(self.middle(self.embedding(words))))
        return scores


@exhibit("tied", "tied weights (embedding and head)", refused_by={**NO_SPARSE, **NO_ROW})
class Tied(Words):
    """One weight in two places."""

    def model(self) -> nn.Module:
        return _Tied()


@exhibit("frozen", "a frozen part", refused_by=NO_SPARSE)
class Frozen(Small):
    """The first layer never trains, and the optimizer is not told."""

    def model(self) -> nn.Module:
        made = nn.Sequential(
            nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, CLASSES)
        )
        made[0].requires_grad_(False)
        return made


@exhibit("groups", "several parameter groups with their own rates and decay", refused_by=NO_SPARSE)
class Groups(Small):
    """Biases without weight decay, and the head faster."""

    def optimizer(self, model: nn.Module) -> Optimizer:
        biases = [parameter for name, parameter in model.named_parameters() if name.endswith("bias")]
        return torch.optim.AdamW(
            [
                {"params": [model[0].weight], "lr": 0.01},
                {"params": [model[3].weight], "lr": 0.03, "betas": (0.8, 0.9)},
                {"params": biases, "weight_decay": 0.0},
            ],
            lr=0.02,
            weight_decay=0.1,
        )
