"""Models whose bits are easily lost: batch statistics, tokens, recurrence, a weight in two places."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import Dataset, TensorDataset

from paceline import Loss, Task

SAMPLES = 61
IGNORED = -100


class _Small(Task):
    def __init__(self, optimizer: str = "adamw") -> None:
        self._optimizer = optimizer

    def optimizer(self, model: nn.Module) -> Optimizer:
        made = {"adamw": torch.optim.AdamW, "adafactor": torch.optim.Adafactor}
        if self._optimizer == "momentum":
            return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        return made[self._optimizer](model.parameters(), lr=0.01)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        return Loss.mean(F.cross_entropy(model(batch[0]), batch[1], reduction="none"))


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


class Pictures(_Small):
    """A CNN with BatchNorm and dropout."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 5, 3),
            nn.BatchNorm2d(5),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Flatten(),
            nn.Linear(5 * 16, 3),
        )

    def train_data(self) -> TensorDataset:
        made = _generator()
        return TensorDataset(
            torch.randn(SAMPLES, 1, 6, 6, generator=made), torch.randint(3, (SAMPLES,), generator=made)
        )


class Sentences(_Small):
    """A transformer over texts of varying length, its loss weighted by tokens."""

    def model(self) -> nn.Module:
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        return nn.Sequential(nn.Embedding(13, 16), layer, nn.Linear(16, 13))

    def train_data(self) -> TensorDataset:
        made = _generator()
        ids = torch.randint(13, (SAMPLES, 9), generator=made)
        lengths = torch.randint(1, 10, (SAMPLES, 1), generator=made)
        return TensorDataset(ids, torch.where(torch.arange(9) < lengths, ids.roll(-1, 1), IGNORED))

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        return Loss.tokens(model(batch[0]), batch[1], ignore_index=IGNORED)


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.gru, self.head = (
            nn.Embedding(13, 8),
            nn.GRU(8, 12, batch_first=True),
            nn.Linear(12, 3),
        )

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.head(self.gru(self.embedding(ids))[0][:, -1])
        return scores


class Sequences(_Small):
    """An embedding and a GRU."""

    def model(self) -> nn.Module:
        return _Recurrent()

    def train_data(self) -> TensorDataset:
        made = _generator()
        return TensorDataset(
            torch.randint(13, (SAMPLES, 7), generator=made), torch.randint(3, (SAMPLES,), generator=made)
        )


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.middle = nn.Embedding(13, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 13, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.head(
            F.dropout(torch.relu(self.middle(self.embedding(ids))), 0.1, self.training)
        )
        return scores


class Tied(Sentences):
    """One weight as embedding and as head."""

    def model(self) -> nn.Module:
        return _Tied()


class _Noisy(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, plain: TensorDataset) -> None:
        self._plain = plain

    def __len__(self) -> int:
        return len(self._plain)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        picture, target = self._plain[index]
        return picture + 0.1 * torch.randn_like(picture), target


class Augmented(Pictures):
    """Pictures with noise drawn anew in every epoch, by whoever loads them."""

    def train_data(self) -> Dataset[tuple[Tensor, Tensor]]:  # type: ignore[override]
        return _Noisy(super().train_data())
