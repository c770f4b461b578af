"""The models and the data that the benchmarks train: one Linear, a 5 M-parameter MLP, a 10 M-parameter GPT."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset


@dataclass(frozen=True)
class Case:
    """What is trained: a model, its data, and the loss of each sample (or token) of a batch."""

    name: str
    make_model: Callable[[], nn.Module]
    make_data: Callable[[], TensorDataset]
    losses: Callable[[nn.Module, tuple[Tensor, ...]], Tensor]
    batch_size: int
    """Samples of the global batch."""
    steps: int
    """Steps of one block: long enough to be timed, short enough to be interleaved."""


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(self.first(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.second(x))


class Gpt(nn.Module):
    def __init__(self, vocabulary: int = 512, width: int = 256, layers: int = 12, length: int = 64) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        return self.head(self.norm(self.blocks(self.tokens(ids) + self.places(places))))


def _classes(samples: int, features: int, classes: int) -> TensorDataset:
    return TensorDataset(torch.randn(samples, features), torch.randint(classes, (samples,)))


def _classify(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def _next_token(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    ids = batch[0]
    logits = model(ids[:, :-1])
    return (
        F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        .view(len(ids), -1)
        .mean(1)
    )


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(1024, 1600),
        nn.ReLU(),
        nn.Linear(1600, 1600),
        nn.ReLU(),
        nn.Linear(1600, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )


CASES = {
    case.name: case
    for case in (
        Case("linear", lambda: nn.Linear(20, 2), lambda: _classes(8192, 20, 2), _classify, 64, 200),
        Case("mlp", _mlp, lambda: _classes(8192, 1024, 10), _classify, 128, 10),
        Case("gpt", Gpt, lambda: TensorDataset(torch.randint(512, (2048, 65))), _next_token, 8, 4),
    )
}
