"""Tasks whose models are made to be hard to cut into stages; workers import them from here."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from paceline import Loss
from tests.contract.tasks import CLASSES, FEATURES, LENGTH, WORDS, Balanced, Classify, Tokens

WIDTH = 8


class Deep(Classify):
    """Twelve layers in a row: dropout at both ends, running statistics, one activation in several places."""

    def model(self) -> nn.Module:
        act = nn.ReLU()
        return nn.Sequential(
            nn.Dropout(0.1),
            nn.Linear(FEATURES, 16),
            nn.Sequential(act, nn.BatchNorm1d(16, track_running_stats=True), nn.Dropout(0.2)),
            nn.Linear(16, 12),
            act,
            nn.LayerNorm(12),
            nn.Linear(12, 16),
            nn.Dropout(0.3),
            nn.Tanh(),
            nn.Linear(16, CLASSES),
        )

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Two groups that have nothing to do with stages: weights decay, the rest does not."""
        matrices = [one for one in model.parameters() if one.dim() > 1]
        others = [one for one in model.parameters() if one.dim() < 2]
        return torch.optim.AdamW(
            [{"params": others, "weight_decay": 0.0}, {"params": matrices, "weight_decay": 0.1}], lr=0.02
        )


class Block(nn.Module):
    """A residual block that is handed a mask, and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, stream: Tensor, *, mask: Tensor, scale: float) -> Tensor:
        """Mix each place with those before it."""
        return stream + self.drop(F.gelu(self.mix(mask @ self.norm(stream)))) * scale


class Written(nn.Module):
    """A forward pass of its own: two tables before the blocks, one of which was made last, and a parameter of its own."""

    def __init__(self, blocks: int, tied: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.scores = nn.Linear(WIDTH, WORDS, bias=False)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))
        if tied:
            self.scores.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        """Give scores for each place."""
        length = words.shape[1]
        mask = torch.ones(length, length, device=words.device).tril() / length
        stream = self.words(words) + self.places(torch.arange(length, device=words.device))
        for block in self.blocks:
            stream = block(stream, mask=mask, scale=0.5)
        scores: Tensor = self.scores(stream * self.gain)
        return scores


class Sentences(Balanced):
    """Sentences through blocks, with two auxiliary terms and a limit on the gradient."""

    max_grad_norm = 0.05

    def __init__(self, samples: int = 30, blocks: int = 7, tied: bool = False) -> None:
        super().__init__(samples=samples)
        self.blocks, self.tied = blocks, tied

    def model(self) -> nn.Module:
        return Written(self.blocks, self.tied)

    def collate(self, items: Any) -> tuple[Tensor, Tensor]:
        """Cut a batch off at its longest sentence, so that batches differ in length too."""
        words, targets = (torch.stack(column) for column in zip(*items, strict=True))
        longest = int((targets >= 0).sum(1).max())
        return words[:, :longest], targets[:, :longest]


class Plainer(Sentences):
    """The same without auxiliary terms."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        return Loss.tokens(model(batch[0]), batch[1])


class Noisy(Classify):
    """A loss that draws before the model is called, and looks at what it drew afterwards."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        features, labels = batch
        noise = torch.randn_like(features)
        scores = model(features + 0.1 * noise)
        weight = (noise[:, 0] > 0) + 0.5 * torch.rand(len(noise))
        return Loss((weight * F.cross_entropy(scores, labels, reduction="none")).sum(), weight.sum())


class Scaled(Classify):
    """A loss that works on its batch in place, and uses it again behind the model."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        features, labels = batch
        features.sub_(0.5).div_(2.0)
        labels.add_(1).remainder_(CLASSES)
        scores = model(features)
        return Loss.mean(F.cross_entropy(scores, labels, reduction="none") * features[:, 0].exp())


class Jitter(nn.Module):
    """Scales by numbers from numpy and Python."""

    def forward(self, values: Tensor) -> Tensor:
        """Draw one of each, and a normal one, of which both keep another back."""
        if not self.training:
            return values
        factor = random.uniform(0.5, 1.5) * random.gauss(1.0, 0.1)
        return values * (factor * float(np.random.uniform(0.5, 1.5)) + 0.1 * float(np.random.randn()))


class Mixed(Classify):
    """Draws from numpy and Python before the model, on every stage of it, and behind it."""

    def model(self) -> nn.Module:
        layers = (nn.Linear(FEATURES, 16), nn.Linear(16, 16), nn.Linear(16, CLASSES))
        return nn.Sequential(*(nn.Sequential(layer, Jitter()) for layer in layers))

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        features, labels = batch
        part = float(np.random.beta(1, 1))
        order = torch.tensor(random.sample(range(len(labels)), len(labels)))
        scores = model(part * features + (1 - part) * features[order])
        left, right = (F.cross_entropy(scores, one, reduction="none") for one in (labels, labels[order]))
        return Loss.mean(
            (part * left + (1 - part) * right) * random.uniform(0.5, 1.5) * float(np.random.rand())
        )


class Drawn(nn.Module):
    """A forward pass that draws itself before the cut and behind it, and uses the first number again behind it."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(FEATURES, 16), nn.Linear(16, 16), nn.Linear(16, 16)])
        self.head, self.drop = nn.Linear(16, CLASSES), nn.Dropout(dropout)

    def forward(self, values: Tensor) -> Tensor:
        """Draw before each block, from torch too; dropout in between is refused."""
        first = random.uniform(0.5, 1.5)
        for block in self.blocks:
            factor = float(np.random.uniform(0.5, 1.5)) + float(torch.rand(()))
            values = self.drop(torch.tanh(block(values)) * factor)
        return self.head(values) * first  # type: ignore[no-any-return]


class MixedForward(Mixed):
    """The same with a forward pass of its own."""

    def model(self) -> nn.Module:
        return Drawn(self.dropout)


class Named(Deep):
    """Says itself where it may be cut."""

    def __init__(self, cuts: str = "3", samples: int = 61) -> None:
        super().__init__(samples=samples)
        self.cuts = cuts

    def pipeline_stages(self) -> list[str]:
        return self.cuts.split("+")


class Peeking(Tokens):
    """A loss that looks at a weight."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        scores = model(batch[0])
        return Loss.tokens(scores + model[0].weight.sum(), batch[1])


class Wider(nn.Module):
    """Gives its input in 64 bits."""

    def forward(self, values: Tensor) -> Tensor:
        """Convert."""
        return values.double()


class Doubled(Classify):
    """Weights of 64 bits, and a limit on their gradient."""

    def model(self) -> nn.Module:
        return nn.Sequential(Wider(), *super().model()).double()


class Halved(Sentences):
    """The same computed in bf16."""

    precision = "bf16"
