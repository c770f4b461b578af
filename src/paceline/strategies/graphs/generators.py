"""Random numbers of a captured step: each shard draws from a generator of its own, which is seeded before each replay."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from paceline.strategies.base import StepWork


def drew_on_the_host(seed: int) -> bool:
    """Return whether anybody has drawn from Python's, numpy's or torch's CPU stream since they were seeded with this."""
    numpy_state = np.random.RandomState(seed & 0xFFFFFFFF).get_state(legacy=False)
    now = np.random.get_state(legacy=False)
    return not (
        torch.equal(torch.default_generator.get_state(), torch.Generator().manual_seed(seed).get_state())
        and random.getstate() == random.Random(seed).getstate()  # noqa: S311
        and isinstance(now, dict)
        and isinstance(numpy_state, dict)
        and now["state"]["pos"] == numpy_state["state"]["pos"]
        and np.array_equal(now["state"]["key"], numpy_state["state"]["key"])
    )


class ShardGenerators:
    """One CUDA generator for each shard of a captured step that has batches."""

    def __init__(self, work: StepWork, device: torch.device) -> None:
        self._stream = torch.cuda.default_generators[device.index or 0]
        self._places = [place for place, shard in enumerate(work.shards) if shard.batches]
        self._own = [torch.Generator(device) for _ in self._places]
        self._next: Iterator[torch.Generator] = iter(())

    def register(self, graph: torch.cuda.CUDAGraph) -> None:
        """Make a graph read them anew at each replay."""
        for generator in self._own:
            graph.register_generator_state(generator)

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Put the stream back afterwards that `enter_shard` exchanges."""
        before = self._stream.graphsafe_get_state()
        self._next = iter(self._own)
        try:
            yield
        finally:
            self._stream.graphsafe_set_state(before)

    def enter_shard(self, seed: int) -> None:  # noqa: ARG002  (each replay has its own)
        """Have the passes of the next shard draw from its generator."""
        self._stream.graphsafe_set_state(next(self._next).graphsafe_get_state())

    def seed(self, work: StepWork) -> None:
        """Set them to where the shards of a step begin."""
        for place, generator in zip(self._places, self._own, strict=True):
            generator.manual_seed(work.shards[place].seed)


def last_seed(work: StepWork) -> int | None:
    """Return what the streams of the last shard with batches began with."""
    seeds: Sequence[int] = [shard.seed for shard in work.shards if shard.batches]
    return seeds[-1] if seeds else None
