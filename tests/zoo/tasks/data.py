"""Where samples come from: augmentation, loading processes, streams, a collate of one's own."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from tests.zoo.exhibits import exhibit
from tests.zoo.tasks.base import IGNORED, SAMPLES, WORDS, Small, Words, drawn

Pair = tuple[Tensor, Tensor]


class _Noisy(Dataset[Pair]):
    """Noise of three sources, drawn by whoever loads a sample."""

    def __init__(self, plain: TensorDataset) -> None:
        self._plain = plain

    def __len__(self) -> int:
        return len(self._plain)

    def __getitem__(self, index: int) -> Pair:
        features, label = self._plain[index]
        features = features + 0.1 * torch.randn_like(features) + 0.1 * float(np.random.randn())
        return (features.flip(0) if random.random() < 0.5 else features), label


@exhibit("augmented", "augmentation by torch, numpy and `random`")
class Augmented(Small):
    """Three random sources."""

    def train_data(self) -> Any:
        return _Noisy(self.data(SAMPLES, 1))


@exhibit("loaded", "augmentation in two loading processes for each worker", resumes=False)
class Loaded(Augmented):
    """Samples are read elsewhere."""

    num_workers = 2


class _Stream(IterableDataset[Pair]):
    """Items one after the other, with noise, in an order of the stream's own."""

    def __init__(self, plain: TensorDataset) -> None:
        self._plain = plain

    def __iter__(self) -> Iterator[Pair]:
        for features, label in self._plain:
            yield features + 0.1 * torch.randn_like(features), label


class _Measured(_Stream):
    def __len__(self) -> int:
        return len(self._plain)


@exhibit("stream", "a stream without a length")
class Stream(Small):
    """Nobody knows when an epoch ends."""

    def train_data(self) -> Any:
        return _Stream(self.data(SAMPLES, 1))


@exhibit("stream-with-length", "a stream with a length, read by a loading process")
class StreamWithLength(Small):
    """An `IterableDataset` that has `__len__`."""

    num_workers = 1

    def train_data(self) -> Any:
        return _Measured(self.data(SAMPLES, 1))


@exhibit("collated", "a collate of one's own that pads, and draws")
class Collated(Words):
    """Lists of different lengths."""

    def data(self, samples: int, seed: int) -> Any:
        lengths = torch.randint(1, 7, (samples,), generator=drawn(seed)).tolist()
        return [
            torch.randint(1, WORDS, (length,), generator=drawn(seed + n)) for n, length in enumerate(lengths)
        ]

    def collate(self, items: Sequence[Tensor]) -> Pair:
        words = nn.utils.rnn.pad_sequence(list(items), batch_first=True)
        dropped = torch.where(torch.rand(words.shape) < 0.1, 0, words)
        return dropped, torch.where(words == 0, IGNORED, (words * 3 + 1) % WORDS)
