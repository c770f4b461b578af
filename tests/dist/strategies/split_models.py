"""Tasks for split layers: attention and a gated MLP with dropout, and what a plan must not get past unnoticed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from paceline import Loss, Mean, Task
from tests.contract.tasks import ADAM_EPSILON, LEARNING_RATE, drawn

WORDS, LENGTH, WIDTH, HEADS = 10, 5, 8, 4


class Attention(nn.Module):
    """Attention with a layer for each of query, key and value, and dropout on what is looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, stream: Tensor) -> Tensor:
        batch, length, _ = stream.shape
        query, key, value = (
            layer(stream).view(batch, length, self.heads, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        looked = self.dropout((query @ key.mT / key.shape[-1] ** 0.5).softmax(-1))
        made: Tensor = self.out((looked @ value).transpose(1, 2).reshape(batch, length, -1))
        return made


class Gated(nn.Module):
    """A gated MLP with dropout on its hidden features."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, 12), nn.Linear(WIDTH, 12, bias=False)
        self.down = nn.Linear(12, WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, stream: Tensor) -> Tensor:
        values = self.norm(stream)
        made: Tensor = self.down(self.dropout(F.silu(self.gate(values)) * self.up(values)))
        return made


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.feed = nn.LayerNorm(WIDTH), Attention(), Gated()
        self.dropout = nn.Dropout(0.1)

    def forward(self, stream: Tensor) -> Tensor:
        stream = stream + self.attention(self.norm(stream))
        return stream + self.dropout(self.feed(stream))


class Model(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.block = block
        self.scores = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.scores(self.block(self.words(words)))
        return scores


class Reading(Task):
    """The next word of a sentence; sentences end early."""

    batch_size = 8
    epochs = 50
    max_grad_norm = 0.5

    def __init__(self, optimizer: str = "adamw") -> None:
        self.kind = optimizer

    def model(self) -> nn.Module:
        return Model(Block())

    def optimizer(self, model: nn.Module) -> Optimizer:
        if self.kind == "adamw":
            return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=ADAM_EPSILON)
        if self.kind == "adagrad":
            return torch.optim.Adagrad(model.parameters(), lr=LEARNING_RATE, eps=ADAM_EPSILON)
        return torch.optim.Adafactor(model.parameters())

    def train_data(self) -> TensorDataset:
        words = torch.randint(WORDS, (30, LENGTH), generator=drawn(5))
        lengths = torch.randint(1, LENGTH + 1, (30, 1), generator=drawn(6))
        return TensorDataset(
            words, torch.where(torch.arange(LENGTH) < lengths, (words * 3 + 1) % WORDS, -100)
        )

    def eval_data(self) -> TensorDataset:
        return self.train_data()

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        words, targets = batch
        return Loss.tokens(model(words), targets)

    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Mean]:
        words, targets = batch
        scores = model(words)
        return {"accuracy": Mean((scores.argmax(-1) == targets).sum(), (targets >= 0).sum())}


class EachItem(Reading):
    """The same with one loss for each word, and an auxiliary term over the scores."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        words, targets = batch
        scores = model(words)
        losses = F.cross_entropy(
            scores.reshape(-1, WORDS), targets.clamp(min=0).reshape(-1), reduction="none"
        )
        return Loss.mean(losses, size=Loss(0.1 * scores.square().sum(), scores.numel()))


class Wrapped(Reading):
    """The same with a block that can be recomputed: what is split lies inside it."""

    def block_modules(self) -> list[str]:
        return ["block"]


class Bare(Reading):
    """A model that is one layer, and so has no name."""

    def model(self) -> nn.Module:
        return nn.Linear(WORDS, WORDS)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        return super().loss(model, (F.one_hot(batch[0], WORDS).float(), batch[1]))

    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Mean]:
        return super().metrics(model, (F.one_hot(batch[0], WORDS).float(), batch[1]))


class Ways(nn.Module):
    """Two modules in a row that hold something in common."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, stream: Tensor) -> Tensor:
        made: Tensor = self.second(stream + self.first(stream))
        return made


class Scaled(nn.Module):
    """A layer that another module may hold, too, and a factor of its own."""

    def __init__(self, core: nn.Linear) -> None:
        super().__init__()
        self.core, self.factor = core, nn.Parameter(torch.ones(WIDTH))

    def forward(self, stream: Tensor) -> Tensor:
        made: Tensor = torch.tanh(self.core(stream)) * self.factor
        return made


class TwoNames(Reading):
    """What a model holds under two names: a layer, one of a pair, a whole block, a dropout, a bias."""

    def __init__(self, shared: str, plan: str = "") -> None:
        super().__init__()
        self.shared, self.plan = shared, plan

    def model(self) -> nn.Module:
        if self.shared == "layer":
            core = nn.Linear(WIDTH, WIDTH)
            return Model(Ways(Scaled(core), Scaled(core)))
        if self.shared == "block":
            block = Block()
            return Model(Ways(block, block))
        one, other = Gated(), Gated()
        if self.shared == "half of a pair":
            other.down = one.down
        elif self.shared == "dropout":
            dropout = one.dropout
            del one.dropout
            one.spare = one.dropout = dropout  # the first name is one that nobody calls
        elif self.shared == "bias":
            other.gate.bias = one.gate.bias
        return Model(Ways(one, other))

    def tensor_plan(self) -> Mapping[str, Any] | None:
        return {self.plan: ColwiseParallel()} if self.plan else None


class Smoothed(Reading):
    """Labels smoothed by hand: torch's own loss_parallel gives a wrong gradient of it without a word."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        words, targets = batch
        likely = F.log_softmax(model(words).reshape(-1, WORDS), -1)
        total = (
            F.nll_loss(likely, targets.clamp(min=0).reshape(-1), reduction="sum")
            - 0.3 * likely.mean(-1).sum()
        )
        return Loss(total, targets.numel())


class Mixing(Reading):
    """A loss that puts scores and something of its own together."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        words, targets = batch
        return Loss.tokens(model(words) + torch.zeros(WORDS), targets)


class Pair(nn.Module):
    """Two layers a plan may name, and between them what each worker has a part of only."""

    def __init__(self, between: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.between = between
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, stream: Tensor) -> Tensor:
        hidden = self.up(stream)
        if self.between == "softmax":
            hidden = hidden.softmax(-1)
        elif self.between == "dropout":
            hidden = F.dropout(hidden, 0.5, self.training)
        elif self.between == "scale":
            hidden = hidden * self.scale
        made: Tensor = self.down(hidden)
        return made


class Between(Reading):
    """A proposal that looks right, and is not."""

    def __init__(self, between: str) -> None:
        super().__init__()
        self.between = between

    def model(self) -> nn.Module:
        return Model(Pair(self.between))


class Planned(Between):
    """The same with a plan of the task's own."""

    def __init__(self, between: str = "nothing", layer: str = "block.up") -> None:
        super().__init__(between)
        self.layer = layer

    def tensor_plan(self) -> Mapping[str, Any]:
        return {self.layer: "columns", "*.down": "rows"}
