"""Tasks whose models ask something special of a strategy; workers import them from here."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline import Loss
from tests.contract.tasks import CLASSES, FEATURES, Classify, Tokens


class Branches(nn.Module):
    """Uses one branch or the other as the data says, and a third one never."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(FEATURES, CLASSES) for _ in range(3))

    def forward(self, features: Tensor) -> Tensor:
        """Take the branch by the sign of the batch's first number."""
        branch: Tensor = self.branches[int(features[0, 0] > 0)](features)
        return branch


class Branching(Classify):
    """Parameters without a gradient must stay as they are, weight decay and all."""

    find_unused_parameters = True

    def model(self) -> nn.Module:
        return Branches()

    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.05, eps=0.05, weight_decay=0.5)


class ForbiddenBranching(Branching):
    """The same without saying so."""

    find_unused_parameters = False


class Halved(Tokens):
    """The model computes in bf16."""

    precision = "bf16"

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        scores = model(batch[0])
        assert scores.dtype == torch.bfloat16
        return Loss.tokens(scores, batch[1])


class Plain(Classify):
    """As little as can be compiled: one layer, batches of one size."""

    def __init__(self, samples: int = 64) -> None:
        super().__init__(samples=64, optimizer="sgd")

    def model(self) -> nn.Module:
        return nn.Linear(FEATURES, CLASSES)

    def eval_data(self) -> None:
        return None


class Weighed(Tokens):
    """A loss that looks past the model's output at one of its weights: an auxiliary term of its own."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        words, targets = batch
        rare = Loss(0.3 * model[0].weight[words].abs().sum(), (words == 0).sum() + 0.5 * len(words))
        return Loss.tokens(model(words), targets, rare=rare)
