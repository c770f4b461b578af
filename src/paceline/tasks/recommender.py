"""A small recommender on generated clicks, of which the best possible answer is known.

Users and items have hidden tastes; whether a user clicks on an item is drawn with a probability that only the generator
knows. So evaluation shows beside each figure what nobody could do better: `best_accuracy` is that of a model which knows
the probabilities. Each step touches a few rows of two large tables, whose gradients are sparse.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from paceline.task import Loss, Mean, Task

TASTES = 2
"""Hidden numbers of each user and item."""
SHARPNESS = 2.0
"""How strongly clicks follow tastes: at 2 the best accuracy is 0.82."""
LEANING = 0.5
"""How far tastes lean to one side."""
EVALUATION = 8192


class Recommender(Task):
    """Two embedding tables and a small network that says whether a user clicks on an item."""

    name = "recommender"
    batch_size = 512
    shards = 8
    epochs = 3

    def __init__(
        self, users: int = 1000, items: int = 500, clicks: int = 131_072, width: int = 8, lr: float = 0.3
    ) -> None:
        self.users, self.items, self.clicks = users, items, clicks
        self.width = width
        self.lr = lr

    def model(self) -> nn.Module:
        """Make the tables, whose gradients are rows, and the network behind them."""
        return TwoTables(self.users, self.items, self.width)

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Make Adagrad: it takes sparse gradients and dense ones, and gives each row a rate of its own."""
        return torch.optim.Adagrad(model.parameters(), lr=self.lr)

    def train_data(self) -> TensorDataset:
        """Draw pairs of user and item, and whether there was a click."""
        return clicks(self.users, self.items, self.clicks, 1)

    def eval_data(self) -> TensorDataset:
        """Draw others, from the same tastes."""
        return clicks(self.users, self.items, EVALUATION, 2)

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Loss:
        """Return the mean cross-entropy of the clicks."""
        users, items, clicked, _ = batch
        return Loss.mean(F.binary_cross_entropy_with_logits(model(users, items), clicked, reduction="none"))

    def metrics(self, model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Mean]:
        """Measure accuracy and loss, and the best that any model can expect of these samples."""
        users, items, clicked, chance = batch
        scores = model(users, items)
        loss = F.binary_cross_entropy_with_logits(scores, clicked, reduction="sum")
        size = len(clicked)
        return {
            "accuracy": Mean(((scores > 0) == (clicked > 0.5)).sum(), size),
            "best_accuracy": Mean(torch.maximum(chance, 1 - chance).sum(), size),
            "loss": Mean(loss, size),
            "best_loss": Mean(F.binary_cross_entropy(chance, chance, reduction="sum"), size),
        }


class TwoTables(nn.Module):
    """A row for each user and each item, and a network that looks at both rows and at their product."""

    def __init__(self, users: int, items: int, width: int) -> None:
        super().__init__()
        self.users = nn.Embedding(users, width, sparse=True)
        self.items = nn.Embedding(items, width, sparse=True)
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.3)
        self.network = nn.Sequential(nn.Linear(3 * width, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """Return a score for each pair: above 0 is a click."""
        user, item = self.users(users), self.items(items)
        both = user * item
        scores: Tensor = self.network(torch.cat([user, item, both], dim=-1)).squeeze(-1)
        scores += both.sum(-1)
        return scores


@cache
def clicks(users: int, items: int, count: int, seed: int) -> TensorDataset:
    """Draw user, item, whether it was clicked (0 or 1), and the probability of that."""
    tastes = torch.Generator().manual_seed(0)
    # Some users click more than others, and some items are liked by most: what a model learns first.
    user_tastes = torch.randn(users, TASTES, generator=tastes) + LEANING
    item_tastes = torch.randn(items, TASTES, generator=tastes) + LEANING
    draw = torch.Generator().manual_seed(seed)
    chosen = torch.randint(users, (count,), generator=draw)
    shown = torch.randint(items, (count,), generator=draw)
    likes = (user_tastes[chosen] * item_tastes[shown]).sum(-1) - TASTES * LEANING**2
    chance = torch.sigmoid(SHARPNESS * likes)
    clicked = (torch.rand(count, generator=draw) < chance).float()
    return TensorDataset(chosen, shown, clicked, chance)
