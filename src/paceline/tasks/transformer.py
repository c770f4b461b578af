"""A small causal transformer, written out: pre-norm blocks, learned positions."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.feed_norm = nn.LayerNorm(width)
        self.feed_in = nn.Linear(width, 4 * width)
        self.feed_out = nn.Linear(4 * width, width)

    def forward(self, stream: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape; a position sees itself and those before it."""
        batch, length, width = stream.shape
        projected = self.attention_in(self.attention_norm(stream))
        query, key, value = projected.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        stream = stream + self.attention_out(seen.transpose(1, 2).reshape(batch, length, width))
        hidden: Tensor = self.feed_out(F.gelu(self.feed_in(self.feed_norm(stream))))
        return stream + hidden


class Transformer(nn.Module):
    """Tokens in, scores for the next token out; padding goes at the end, where no real token sees it."""

    def __init__(self, *, tokens: int, length: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.token = nn.Embedding(tokens, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, tokens)

    def embed(self, tokens: Tensor) -> Tensor:
        """Turn tokens into vectors that say what stands where."""
        position = torch.arange(tokens.shape[1], device=tokens.device)
        embedded: Tensor = self.token(tokens) + self.position(position)
        return embedded

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (batch, length) tokens to (batch, length, tokens) scores."""
        stream = self.embed(tokens)
        for block in self.blocks:
            stream = block(stream)
        scores: Tensor = self.scores(self.norm(stream))
        return scores
