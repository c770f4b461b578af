"""Trainings that workers of a sharded run do, each in a run of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from paceline import Loss, Mean, Run
from paceline.tasks.transformer import Transformer

TOKENS, LENGTH = 11, 6
RATE = 0.01
"""Of AdamW, and its epsilon: so a weight moves by no more than its gradient does."""


class Model(Transformer):
    """A transformer with dropout and a normalisation that keeps statistics."""

    def __init__(self) -> None:
        super().__init__(tokens=TOKENS, length=LENGTH, width=8, layers=2, heads=2)
        self.drop = nn.Dropout(0.2)
        self.channels = nn.BatchNorm1d(LENGTH)

    def embed(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.channels(self.drop(super().embed(tokens)))
        return embedded


class Shared(nn.Module):
    """One block that every pass goes through twice, and a weight that two layers of it share."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.scores = nn.Linear(8, TOKENS, bias=False)
        self.scores.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Go through the first layer twice."""
        hidden = self.layers[1](
            torch.tanh(self.layers[0](torch.tanh(self.layers[0](self.embedding(tokens)))))
        )
        scores: Tensor = self.scores(hidden)
        return scores


class Reads(nn.Module):
    """A block of a decoder, which uses what the encoder made twice."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.value, self.mix = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, stream: Tensor, memory: Tensor) -> Tensor:
        """Read from the encoder's output into the stream."""
        read: Tensor = stream + self.mix(torch.tanh(self.key(memory)) * self.value(memory))
        return read


class Crossed(nn.Module):
    """Several blocks that are given one tensor: its gradient is a sum over the uses of all of them, in one order."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 8)
        self.encoder = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Reads() for _ in range(3))
        self.scores = nn.Linear(8, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (batch, length) tokens to (batch, length, tokens) scores."""
        stream = self.embedding(tokens)
        memory = torch.tanh(self.encoder(stream))
        for block in self.blocks:
            stream = block(stream, memory=memory)
        scores: Tensor = self.scores(stream)
        return scores


class Adapted(nn.Module):
    """A layer in few bits that is not trained, one beside it that is, and a table that all such blocks share."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8, dtype=torch.bfloat16).requires_grad_(False)
        self.tuned = nn.Linear(8, 8)
        self.register_buffer("table", table)

    def forward(self, stream: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        return torch.tanh(self.tuned(stream) + self.base(stream.bfloat16())) * self.table


class Partly(nn.Module):
    """Blocks that are trained in part, the first one not at all."""

    def __init__(self) -> None:
        super().__init__()
        table = torch.linspace(0.5, 1.5, 8)
        self.embedding = nn.Embedding(TOKENS, 8)
        self.blocks = nn.Sequential(*(Adapted(table) for _ in range(3)))
        self.blocks[0].requires_grad_(False)
        self.scores = nn.Linear(8, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (batch, length) tokens to (batch, length, tokens) scores."""
        scores: Tensor = self.scores(self.blocks(self.embedding(tokens)))
        return scores


@dataclass(frozen=True, kw_only=True)
class Training:
    """One run of a few steps."""

    model: type[nn.Module] = Model
    shards: int = 4
    samples: int = 21
    batch_size: int = 9
    micro_batch: int | None = None
    max_grad_norm: float | None = 0.05
    steps: int = 3
    own_loop: bool = False
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What came of it."""

    state: dict[str, Any]
    losses: list[float]
    norms: list[float | None]
    metrics: dict[str, float]
    held: int
    """Bytes of the state that this worker holds."""
    notes: list[str]
    exactness: str


def data(samples: int) -> TensorDataset:
    made = torch.Generator().manual_seed(5)
    tokens = torch.randint(TOKENS, (samples, LENGTH), generator=made)
    return TensorDataset(tokens, (3 * tokens + 1) % TOKENS)


def loss(model: nn.Module, batch: list[Tensor]) -> Loss:
    scores = model(batch[0])
    return Loss.mean(F.cross_entropy(scores.transpose(1, 2), batch[1], reduction="none"))


def train(run: Run, training: Training) -> Outcome:
    options = {"shards": training.shards, "micro_batch": training.micro_batch, **training.options}
    own = Run(run.world, replace(run._engine.state.options, **options))
    replica = own._engine.preparation.prepare_replica(
        training.model,
        lambda model: torch.optim.AdamW(model.parameters(), lr=RATE, eps=RATE, weight_decay=0.1),
    )
    losses, norms = [], []
    loader = own.loader(data(training.samples), batch_size=training.batch_size)
    for step in own.steps(loader, steps=training.steps, max_grad_norm=training.max_grad_norm):
        if training.own_loop:
            for batch in step:
                step.backward(loss(replica.model, batch))
            step.apply()
        else:
            step.compute(loss)
        assert step.result is not None
        losses.append(step.result.loss)
        norms.append(step.result.gradient_norm)
    measured = own.evaluate(data(7), _means, batch_size=training.batch_size)
    state = replica.state()
    return Outcome(
        _copied(state),
        losses,
        norms,
        measured,
        replica.local_state().bytes,
        getattr(replica, "notes", []),
        str(own._engine.state.exactness),
    )


def train_all(run: Run, trainings: Mapping[str, Training]) -> dict[str, Outcome]:
    return {name: train(run, training) for name, training in trainings.items()}


def _means(model: nn.Module, batch: list[Tensor]) -> dict[str, Mean]:
    found = loss(model, batch)
    return {"loss": Mean(found.total, found.weight)}


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return value


def whole(state: dict[str, Any], key: str) -> Tensor:
    """Give a tensor of a whole state by its key."""
    kind, _, name = key.partition("/")
    if kind == "model":
        found: Tensor = state["model"][name]
        return found
    name, _, slot = name.rpartition("/")
    value: Tensor = state["optimizer"]["state"][name][slot]
    return value
