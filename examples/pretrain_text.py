"""A small GPT learns to write from text files, byte by byte.

paceline train examples/pretrain_text.py:Pretrain --workers 2 --set "files=docs/*.md" --max-grad-norm 1
"""

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import paceline

FALLBACK = "".join(f"{n} and {n + 1} make {2 * n + 1}. " for n in range(2000))
END = 256
"""Between two files; the byte behind it cannot be told from what is before, so it does not count."""


class Bytes(Dataset):
    """Pieces of `length` bytes, each with the one that follows."""

    def __init__(self, texts, length):
        tokens = [token for text in texts for token in (*text.encode(), END)]
        self.tokens, self.length = torch.tensor(tokens), length

    def __len__(self):
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, index):
        piece = self.tokens[index * self.length : (index + 1) * self.length + 1]
        return piece[:-1], piece[1:]


class Layer(nn.Module):
    """Attention to what came before, then two linear layers."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        parts = self.attention(self.before(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.network(self.between(x))


class Gpt(nn.Module):
    def __init__(self, length, width, layers, heads):
        super().__init__()
        self.tokens, self.places = nn.Embedding(END + 1, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, END + 1, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Pretrain(paceline.Task):
    batch_size = 16
    shards = 4
    epochs = 1

    def __init__(
        self,
        files: str = "",
        length: int = 64,
        width: int = 32,
        layers: int = 2,
        heads: int = 2,
        lr: float = 3e-3,
    ):
        self.files, self.length, self.width, self.layers, self.heads = files, length, width, layers, heads
        self.lr = lr

    def model(self):
        return Gpt(self.length, self.width, self.layers, self.heads)

    def fsdp_modules(self):
        return [Layer]

    def optimizer(self, model):
        matrices = [one for one in model.parameters() if one.dim() > 1]
        others = [one for one in model.parameters() if one.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.95))

    def _texts(self):
        found = sorted(Path().glob(self.files)) if self.files else []
        return [path.read_text(encoding="utf-8") for path in found] or [FALLBACK]

    def train_data(self):
        return Bytes([text[: len(text) * 9 // 10] for text in self._texts()], self.length)

    def eval_data(self):
        return Bytes([text[len(text) * 9 // 10 :] for text in self._texts()], self.length)

    def loss(self, model, batch):
        tokens, targets = batch
        losses = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="none")
        counts = (
            tokens.flatten() != END
        )  # the weight is the number of bytes that count, on all workers together
        return paceline.Loss((losses * counts).sum(), counts.sum())
