"""Small tasks of ordinary training code, each with something that a sharded strategy could get wrong without a word."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from paceline import Loss, Mean, Task

FEATURES, CLASSES, WORDS = 6, 3, 11


class Ordinary(Task):
    """Classes from features, with weight decay that would move what has no gradient."""

    batch_size = 8

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES)
        )

    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.3)

    def train_data(self) -> TensorDataset:
        features = torch.randn(23, FEATURES, generator=torch.Generator().manual_seed(1))
        return TensorDataset(features, features[:, :CLASSES].argmax(1))

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        return Loss.mean(F.cross_entropy(model(batch[0]), batch[1], reduction="none"))


class Words(Ordinary):
    """The next word from each word."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(WORDS, 8), nn.Tanh(), nn.Linear(8, WORDS))

    def train_data(self) -> TensorDataset:
        words = torch.randint(WORDS, (23, 5), generator=torch.Generator().manual_seed(1))
        return TensorDataset(words, (words * 3 + 1) % WORDS)

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        return Loss.tokens(model(batch[0]), batch[1])


class Row(nn.Module):
    """A row of blocks between two layers, with a method beside its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(FEATURES, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(8, CLASSES)

    def encode(self, features: Tensor) -> Tensor:
        """Return the features before the head."""
        hidden: Tensor = self.inward(features)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden

    def forward(self, features: Tensor) -> Tensor:
        """Return the scores."""
        scores: Tensor = self.head(self.encode(features))
        return scores


class Experts(nn.Module):
    """One expert for each batch, and a router that only the balance of the experts teaches."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(FEATURES, 3)
        self.experts = nn.ModuleList(nn.Linear(FEATURES, CLASSES) for _ in range(3))

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores and the gates."""
        return self.experts[int(features[0, 0] > 0)](features), self.router(features).softmax(-1)


class Balance(Ordinary):
    """An auxiliary term alone reaches the router; no term reaches the third expert, and the first two only at times."""

    find_unused_parameters = True

    def __init__(self, max_grad_norm: bool = False) -> None:
        self.max_grad_norm = 0.05 if max_grad_norm else None

    def model(self) -> nn.Module:
        return Experts()

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        scores, gates = model(batch[0])
        balance = Loss(gates.square().sum(), gates.numel())
        return Loss.mean(F.cross_entropy(scores, batch[1], reduction="none"), balance=balance)


class TwoHeads(Ordinary):
    """The second head is reached by an auxiliary term alone, and nothing was said of unused parameters."""

    def model(self) -> nn.Module:
        model = Row()
        model.second = nn.Linear(8, 4)
        return model

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        hidden = model.encode(batch[0])  # type: ignore[operator]
        other = model.second(hidden)  # type: ignore[operator]
        size = Loss(other.square().sum(), other.numel())
        return Loss.mean(F.cross_entropy(model.head(hidden), batch[1], reduction="none"), size=size)  # type: ignore[operator]


class Methods(Ordinary):
    """The loss calls another method of the model, and reads a weight that belongs to no block."""

    def model(self) -> nn.Module:
        return Row()

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        scores = F.linear(model.encode(batch[0]), model.head.weight, model.head.bias)
        return Loss.mean(F.cross_entropy(scores, batch[1], reduction="none"))


class ReadsBlocks(Methods):
    """The loss reads every weight, those of blocks too."""

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        size = sum(value.square().sum() for value in model.parameters())
        return Loss.mean(F.cross_entropy(model(batch[0]), batch[1], reduction="none") + 0.01 * size)


class ReadsBlocksAtOnce(ReadsBlocks):
    """The same in one wrap."""

    def block_modules(self) -> list[str]:
        return []


class MeasuresBlocks(Methods):
    """A metric makes a number of a weight of a block."""

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        return Ordinary.loss(self, model, batch)

    def metrics(self, model: nn.Module, batch: list[Tensor]) -> dict[str, Mean]:
        model(batch[0])
        return {"norm": Mean(float(model.blocks[0][0].weight.square().sum()), 1)}


class Made(Ordinary):
    """A task of a model and an optimizer that are given as functions."""

    def __init__(
        self,
        model: Callable[[], nn.Module] | None = None,
        optimizer: Callable[[Iterable[Any]], Optimizer] | None = None,
        max_grad_norm: float | None = None,
        blocks: list[str] | None = None,
    ) -> None:
        self._model, self._optimizer, self.max_grad_norm, self._blocks = (
            model,
            optimizer,
            max_grad_norm,
            blocks,
        )

    def model(self) -> nn.Module:
        return super().model() if self._model is None else self._model()

    def optimizer(self, model: nn.Module) -> Optimizer:
        return super().optimizer(model) if self._optimizer is None else self._optimizer(model.parameters())

    def block_modules(self) -> list[str] | None:
        return self._blocks


class MadeWords(Made, Words):
    """The same over words."""

    def model(self) -> nn.Module:
        return Words.model(self) if self._model is None else self._model()


def hooked() -> nn.Module:
    """Return a model with a hook on a parameter."""
    model = Ordinary().model()
    model[0].weight.register_hook(lambda gradient: gradient * 0.5)
    return model


def kept_twice() -> nn.Module:
    """Return a model that holds a parameter in a list of its own."""
    model = Row()
    model.listed = [model.head.weight]  # type: ignore[assignment]
    return model


def mixed(inner: torch.dtype) -> Callable[[], nn.Module]:
    """Return a maker of models with a layer of another type in the middle."""
    return lambda: nn.Sequential(
        nn.Linear(FEATURES, 8), _Middle(nn.Linear(8, 8, dtype=inner), inner), nn.Linear(8, CLASSES)
    )


class _Middle(nn.Module):
    def __init__(self, layer: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer, self.dtype = layer, dtype

    def forward(self, features: Tensor) -> Tensor:
        made = self.layer(features.to(self.dtype))
        return (made.abs() if made.is_complex() else made).to(features.dtype)


def one_number() -> nn.Module:
    """Return a model with a parameter without a dimension."""
    return nn.Sequential(*Ordinary().model(), _Scale())


class _Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, features: Tensor) -> Tensor:
        return features * self.scale


def tied() -> nn.Module:
    """Return a model whose last layer shares the first one's weight."""
    model = nn.Sequential(nn.Embedding(WORDS, 8), nn.Tanh(), nn.Linear(8, WORDS, bias=False))
    model[2].weight = model[0].weight  # type: ignore[assignment]
    return model


class Noted(Ordinary):
    """Groups by what was noted on the parameters when the model was made."""

    def model(self) -> nn.Module:
        model = super().model()
        for value in model.parameters():
            value.decays = value.dim() > 1  # type: ignore[attr-defined]
        return model

    def optimizer(self, model: nn.Module) -> Optimizer:
        groups = {
            decays: [one for one in model.parameters() if one.decays is decays] for decays in (True, False)
        }
        return torch.optim.AdamW(
            [{"params": held, "weight_decay": 0.5 * decays} for decays, held in groups.items()], lr=0.02
        )


class Masked(Words):
    """torch's own encoder with padding: in evaluation it would take another kernel where nobody listens to its layers."""

    def model(self) -> nn.Module:
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        return nn.Sequential(
            nn.Embedding(WORDS, 16), _Encoder(nn.TransformerEncoder(layer, 2)), nn.Linear(16, WORDS)
        )

    def metrics(self, model: nn.Module, batch: list[Tensor]) -> dict[str, Mean]:
        return {"square": Mean(model(batch[0]).double().square().sum(), 1)}


class _Encoder(nn.Module):
    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, hidden: Tensor) -> Tensor:
        padded = hidden[..., 0] < 0.4
        padded[:, 0] = False
        made: Tensor = self.encoder(hidden, src_key_padding_mask=padded)
        return made
