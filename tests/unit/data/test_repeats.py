"""Several steps with each global batch, as several optimizers take turns with it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from paceline.data import Batches, ShardedLoader


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(torch.arange(10.0))


@pytest.mark.parametrize("data", [TensorDataset(torch.arange(10.0)), Stream()], ids=["map-style", "stream"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_batch_is_given_again_and_taken_up_in_the_middle(data: Any, num_workers: int) -> None:
    loader = ShardedLoader(
        data, batch_size=4, shards=2, seed=0, owned=range(2), shuffle=False, num_workers=num_workers
    )
    loader.repeats = 3
    try:
        assert loader.steps_per_epoch in (9, None)
        found = []
        for step in loader.epoch(0, 4, times=3):
            (first,) = step.shards[0].batches
            values = first[0] if isinstance(first, list) else first
            found.append((step.step, step.size, values.tolist()))
            values.zero_()
        second, last = [4.0, 5.0], [8.0]
        assert found == [(4, 4, second), (5, 4, second), (6, 2, last), (7, 2, last), (8, 2, last)]
        assert [step.step for step in loader.epoch(1)] == [0, 1, 2]  # of an evaluation, say
    finally:
        loader.close()


class Stateful(Stream):
    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < 10:
            self.at += 1
            yield torch.tensor(float(self.at - 1))
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_a_stream_with_states_is_read_from_its_beginning() -> None:
    """A state is that of a batch, and a step is a part of one: nothing goes on from it."""
    loader = ShardedLoader(Stateful(), batch_size=4, shards=1, seed=0, owned=range(1))
    loader.repeats = 2
    try:
        whole = list(loader.epoch(0, times=2, states=True))
        assert [(step.step, step.state) for step in whole] == [(number, None) for number in range(6)]
        found = list(loader.epoch(1, 3, times=2, states=True, state={"at": 4}))
        assert [(one.step, one.shards[0].batches[0].tolist()) for one in found] == [
            (3, [4.0, 5.0, 6.0, 7.0]),
            (4, [8.0, 9.0]),
            (5, [8.0, 9.0]),
        ]
    finally:
        loader.close()


def test_batches_of_an_order_are_repeated_as_they_are() -> None:
    sizes = [[0, 1, 2], [3], [4, 5, 6, 7]]
    loader = ShardedLoader(
        TensorDataset(torch.arange(10.0)),
        batch_size=4,
        shards=1,
        seed=0,
        owned=range(1),
        order=lambda seed, epoch: Batches.of(sizes),
    )
    loader.repeats = 2
    try:
        found = [(one.step, one.shards[0].batches[0][0].tolist()) for one in loader.epoch(0, 1, times=2)]
        assert found == [(1, sizes[0]), (2, sizes[1]), (3, sizes[1]), (4, sizes[2]), (5, sizes[2])]
    finally:
        loader.close()
