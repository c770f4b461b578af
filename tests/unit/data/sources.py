"""Data sets for these tests: small, real, and each with one peculiarity."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from paceline.data import ShardedLoader, StepData, owned_shards


class Squares(Dataset[int]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        return index * index


class Noisy(Squares):
    """Draws from all three generators, for odd samples only."""

    def __getitem__(self, index: int) -> Any:
        if index % 2 == 0:
            return torch.tensor([index, 0.0, 0.0, 0.0])
        return torch.tensor([index, torch.rand(()).item(), np.random.rand(), random.random()])


class Faulty(Squares):
    def __init__(self, samples: int, bad: int, error: Exception) -> None:
        super().__init__(samples)
        self.bad, self.error = bad, error

    def __getitem__(self, index: int) -> int:
        if index == self.bad:
            raise self.error
        return index


class TwoPartError(Exception):
    """An exception that cannot be built from its `args` alone."""

    def __init__(self, name: str, number: int) -> None:
        super().__init__(f"{name} has {number}")
        self.number = number


class Stream(IterableDataset[Any]):
    """Draws one number for each item."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        for index in range(self.samples):
            yield torch.tensor([index, torch.rand(()).item(), np.random.rand(), random.random()])


class SeekableStream(Stream):
    """Remembers how far it had to be read."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self.begin = 0
        self.read: list[int] = []

    def seek(self, position: int) -> None:
        self.begin = position

    def __iter__(self) -> Iterator[Any]:
        for index in range(self.begin, self.samples):
            self.read.append(index)
            yield torch.tensor([index, torch.rand(()).item()])


def loader_of(
    dataset: Any, *, rank: int = 0, workers: int = 1, shards: int = 4, **options: Any
) -> ShardedLoader:
    settings = {"batch_size": 8, "seed": 7, **options}
    return ShardedLoader(dataset, shards=shards, owned=owned_shards(rank, workers, shards), **settings)


def epoch_of(dataset: Any, *, epoch: int = 0, start_step: int = 0, **options: Any) -> list[StepData]:
    loader = loader_of(dataset, **options)
    try:
        return list(loader.epoch(epoch, start_step))
    finally:
        loader.close()


def combined(dataset: Any, *, workers: int, epoch: int = 0, start_step: int = 0, **options: Any) -> list[Any]:
    """What all workers read, as one list of comparable (step, size, [(shard, samples, batches)])."""
    shares = [
        epoch_of(dataset, rank=rank, workers=workers, epoch=epoch, start_step=start_step, **options)
        for rank in range(workers)
    ]
    return [
        (steps[0].step, steps[0].size, [shard for step in steps for shard in comparable(step)])
        for steps in zip(*shares, strict=True)
    ]


def comparable(step: StepData) -> list[Any]:
    return [
        (shard.index, shard.samples.tolist(), [torch.as_tensor(batch).tolist() for batch in shard.batches])
        for shard in step.shards
    ]
