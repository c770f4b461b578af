"""What all contenders share: data, models, and a journal of what a run did and when."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from paceline.tasks.digits import read_digits

EPOCHS, BATCH, SAVE_EVERY = 2, 64, 10
HELD_OUT = 103
"""Samples of the evaluation: no number of workers divides it."""
PAUSE_S = float(os.environ.get("COMPARE_PAUSE_S", "0"))
"""How long a step is held up, so that a kill meets the middle of a run."""
PADDING = -100


def digits() -> tuple[Dataset, Dataset]:
    """Return samples of (index, image, label): to train on, and to evaluate on."""
    images, labels = read_digits()
    data = torch.arange(len(images)), images.view(-1, 1, 8, 8) / 16, labels
    return (
        TensorDataset(*(part[:1437] for part in data)),
        TensorDataset(*(part[1437 : 1437 + HELD_OUT] for part in data)),
    )


def classifier() -> nn.Module:
    """Return a small convolutional network with dropout."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(256, 10),
    )


class Reader(nn.Module):
    """A language model: what comes next in a sequence."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.memory, self.answer = nn.Embedding(50, 32), nn.GRU(32, 32), nn.Linear(32, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next token at each place."""
        return self.answer(self.memory(self.embedding(tokens).transpose(0, 1))[0].transpose(0, 1))


def sequences() -> Dataset:
    """Return 32 sequences of 2 to 24 tokens and their labels, which are padded: one global batch."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(50, (32, 24), generator=draw)
    lengths = torch.randint(2, 25, (32, 1), generator=draw)
    labels = torch.where(torch.arange(24) < lengths, tokens.roll(-1, 1), PADDING)
    return TensorDataset(torch.arange(32), tokens, labels)


def exact_reader(steps: int, rate: float) -> nn.Module:
    """Return the model that one process comes to: every token counts once, whichever batch it is in."""
    model, (_, tokens, labels) = Reader(), sequences().tensors  # type: ignore[attr-defined]
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for _ in range(steps):
        optimizer.zero_grad()
        total = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
        (total / (labels != PADDING).sum()).backward()
        optimizer.step()
    return model


def generator() -> nn.Module:
    """Return what makes pictures of noise."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.Sigmoid())


def discriminator() -> nn.Module:
    """Return what tells pictures from made ones."""
    torch.manual_seed(2)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))


class Journal:
    """One process's record: a line when it starts, one for each optimizer step, and one at its end."""

    def __init__(self, rank: int) -> None:
        self.rank, self._out = rank, Path(os.environ["COMPARE_OUT"])
        self._file = (self._out / f"journal-{rank}-{os.getpid()}.jsonl").open("a")
        self._write(pid=os.getpid())

    def step(self, number: int, samples: Tensor | list[int]) -> None:
        """Note an optimizer step that is done, and this process's samples of it."""
        self._write(step=number, samples=torch.as_tensor(samples).tolist())
        time.sleep(PAUSE_S)

    def end(self, *models: nn.Module, **facts: Any) -> None:
        """Note the end; rank 0 keeps the weights."""
        if self.rank == 0:
            weights = torch.cat([one.detach().flatten() for model in models for one in model.parameters()])
            torch.save(weights, self._out / "weights.pt")
        self._write(end=True, **facts)

    def _write(self, **what: Any) -> None:
        self._file.write(json.dumps({"at": time.time(), **what}) + "\n")
        self._file.flush()
