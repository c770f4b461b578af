"""Words in a row: embeddings of all kinds, recurrence, attention, shards without a token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import rnn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from paceline import Loss
from tests.zoo.exhibits import NO_ROW, WHOLE_GRADIENTS, WRITTEN, exhibit
from tests.zoo.tasks.base import IGNORED, LENGTH, WORDS, Steady, Words


class _Embedded(Words):
    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def embedding(self) -> nn.Module:
        return nn.Embedding(WORDS, 12)

    def model(self) -> nn.Module:
        return nn.Sequential(self.embedding(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, WORDS))


@exhibit("sparse", "a sparse embedding (`sparse=True`) with SGD", WHOLE_GRADIENTS, sparse=True)
class Sparse(_Embedded):
    """Only the rows of a batch have a gradient."""

    def embedding(self) -> nn.Module:
        return nn.Embedding(WORDS, 12, sparse=True)


@exhibit(
    "sparse-adam",
    "`torch.optim.SparseAdam` for an embedding alone",
    {**WHOLE_GRADIENTS, "zero": "--shard-optimizer deals out tensors"},
    sparse=True,
)
class SparseAdam(Sparse):
    """Adam's state for rows; the rest of the model is frozen, because SparseAdam takes nothing dense."""

    def model(self) -> nn.Module:
        made = super().model()
        for layer in (made[1], made[3]):
            layer.requires_grad_(False)
        return made

    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.SparseAdam(model[0].parameters(), lr=0.05)


@exhibit("max-norm", "`nn.Embedding(max_norm=...)`, which changes its weight in the forward pass", WRITTEN)
class MaxNorm(_Embedded):
    """Rows that are too long are cut when they are read."""

    def embedding(self) -> nn.Module:
        return nn.Embedding(WORDS, 12, max_norm=1.0)


@exhibit("padding-row", "`nn.Embedding(padding_idx=..., scale_grad_by_freq=True)`")
class PaddingRow(_Embedded):
    """A row without a gradient, and rows that are divided by how often they come."""

    def embedding(self) -> nn.Module:
        return nn.Embedding(WORDS, 12, padding_idx=0, scale_grad_by_freq=True)


class _Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(WORDS, 12, mode="mean", padding_idx=0), nn.Linear(12, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.head(torch.tanh(self.bag(words)))
        return scores[:, None].expand(-1, LENGTH, -1)


@exhibit("bag", "`nn.EmbeddingBag`", NO_ROW)
class Bag(Words):
    """A mean of rows."""

    def model(self) -> nn.Module:
        return _Bag()


class _Recurrent(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, 8), nn.Linear(12, WORDS)
        self.memory = (
            nn.GRU(8, 12, batch_first=True)
            if kind == "gru"
            else nn.LSTM(8, 12, num_layers=2, dropout=0.2, batch_first=True)
        )

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.head(self.memory(self.embedding(words))[0])
        return scores


@exhibit("gru", "a GRU", NO_ROW)
class Gru(Words):
    """Recurrence."""

    def model(self) -> nn.Module:
        return _Recurrent("gru")


class _Packed(_Recurrent):
    def forward(self, words: Tensor) -> Tensor:
        lengths = (words != 0).sum(1).clamp(min=1).cpu()
        packed = rnn.pack_padded_sequence(
            self.embedding(words), lengths, batch_first=True, enforce_sorted=False
        )
        made, _ = rnn.pad_packed_sequence(self.memory(packed)[0], batch_first=True, total_length=LENGTH)
        scores: Tensor = self.head(made)
        return scores


@exhibit("lstm", "a two-layer LSTM with dropout over packed sequences", NO_ROW)
class Lstm(Words):
    """Lengths that differ."""

    def model(self) -> nn.Module:
        return _Packed("lstm")


class _Attention(nn.Module):
    """Causal attention with a mask for padding, written out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.place = nn.Embedding(WORDS, 12), nn.Parameter(torch.zeros(LENGTH, 12))
        self.three, self.out = nn.Linear(12, 36), nn.Linear(12, 12)
        self.head = nn.Linear(12, WORDS)
        self.causal: Tensor
        self.register_buffer("causal", torch.ones(LENGTH, LENGTH).tril().bool(), persistent=False)

    def forward(self, words: Tensor) -> Tensor:
        made = self.embedding(words) + self.place
        q, k, v = self.three(made).chunk(3, -1)
        mask = self.causal & (words != 0)[:, None, :] | torch.eye(LENGTH, dtype=torch.bool)
        scores: Tensor = self.head(made + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask)))
        return scores


@exhibit("attention", "attention with causal and padding masks", NO_ROW)
class Attention(Steady, Words):
    """Masks that depend on the data."""

    def model(self) -> nn.Module:
        return _Attention()


@exhibit("encoder", "`nn.TransformerEncoder` in training and in evaluation", meshes=True)
class Encoder(Steady, Words):
    """torch has a path of its own for it in evaluation."""

    def model(self) -> nn.Module:
        layer = nn.TransformerEncoderLayer(12, 2, 24, dropout=0.1, batch_first=True)
        return nn.Sequential(
            nn.Embedding(WORDS, 12),
            nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
            nn.Linear(12, WORDS),
        )


class _Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(12, 2, 24, dropout=0.1, batch_first=True, norm_first=True)
        self.embedding = nn.Embedding(WORDS, 12)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(12, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        padding = words == 0
        padding[:, 0] = False
        made = self.encoder(self.embedding(words), src_key_padding_mask=padding)
        scores: Tensor = self.head(made)
        return scores


@exhibit("encoder-masked", "`nn.TransformerEncoder` with a padding mask")
class EncoderMasked(Steady, Words):
    """The same with a mask, as a module of its own."""

    def model(self) -> nn.Module:
        return _Masked()


@exhibit("no-tokens", "shards and batches in which no token counts", meshes=True)
class NoTokens(Words):
    """Half of the sentences have no target at all."""

    def data(self, samples: int, seed: int) -> Any:
        words, targets = super().data(samples, seed).tensors
        return TensorDataset(words, torch.where(torch.arange(samples)[:, None] % 2 == 1, targets, IGNORED))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        words, targets = batch
        return Loss.tokens(model(words), targets)
