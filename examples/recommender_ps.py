"""A recommender whose table of items is held by parameter servers.

paceline train examples/recommender_ps.py:Ratings --strategy hybrid --workers 2 --servers 1
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline


def ratings(users, items, count, seed):
    """Draw who gave what how many stars, from tastes that are the same for every seed."""
    tastes = torch.Generator().manual_seed(0)
    user, item = torch.randn(users, 2, generator=tastes), torch.randn(items, 2, generator=tastes)
    draw = torch.Generator().manual_seed(seed)
    who, what = torch.randint(users, (count,), generator=draw), torch.randint(items, (count,), generator=draw)
    return TensorDataset(who, what, 3 + (user[who] * item[what]).sum(-1))


class TwoTables(nn.Module):
    """A row for each user and item; sparse tables are what servers hold, row by row."""

    def __init__(self, users, items, width):
        super().__init__()
        self.users = nn.Embedding(users, width, sparse=True)
        self.items = nn.Embedding(items, width, sparse=True)
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.5)
        self.head = nn.Linear(width, 1)

    def forward(self, who, what):
        return self.head(self.users(who) * self.items(what)).squeeze(-1)


class Ratings(paceline.Task):
    batch_size = 256
    shards = 4
    epochs = 3

    def __init__(
        self, users: int = 300, items: int = 500, count: int = 32768, width: int = 8, lr: float = 0.5
    ):
        self.users, self.items, self.count, self.width, self.lr = users, items, count, width, lr

    def model(self):
        return TwoTables(self.users, self.items, self.width)

    def optimizer(self, model):
        return torch.optim.Adagrad(model.parameters(), lr=self.lr)

    def train_data(self):
        return ratings(self.users, self.items, self.count, seed=1)

    def eval_data(self):
        return ratings(self.users, self.items, 1024, seed=2)

    def loss(self, model, batch):
        who, what, stars = batch
        return paceline.Loss.mean(F.mse_loss(model(who, what), stars, reduction="none"))
