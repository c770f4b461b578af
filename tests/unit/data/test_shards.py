"""The cuts of an epoch lose nothing and repeat nothing."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data import batch_bounds, owned_shards, shard_bounds, steps_per_epoch
from paceline.errors import InputError


@settings(deadline=None)
@given(samples=st.integers(1, 10**12), batch_size=st.integers(1, 10**6))
def test_the_last_batch_ends_the_epoch_and_is_not_empty(samples: int, batch_size: int) -> None:
    steps = steps_per_epoch(samples, batch_size)
    start, stop = batch_bounds(steps - 1, batch_size, samples)
    assert start < stop == samples
    assert batch_bounds(steps, batch_size, samples) == (samples, samples)


@settings(deadline=None)
@given(size=st.integers(0, 500), shards=st.integers(1, 64))
def test_shards_cut_a_batch_into_nearly_equal_parts(size: int, shards: int) -> None:
    bounds = [shard_bounds(shard, shards, size) for shard in range(shards)]
    assert [place for low, high in bounds for place in range(low, high)] == list(range(size))
    lengths = [high - low for low, high in bounds]
    assert max(lengths) - min(lengths) <= 1


@settings(deadline=None)
@given(shards=st.integers(1, 64), data=st.data())
def test_workers_carry_every_shard_once_and_each_at_least_one(shards: int, data: st.DataObject) -> None:
    workers = data.draw(st.integers(1, shards))
    carried = [owned_shards(rank, workers, shards) for rank in range(workers)]
    assert all(carried)
    assert [shard for owned in carried for shard in owned] == list(range(shards))


def test_more_workers_than_shards_is_refused_on_every_worker() -> None:
    for rank in range(3):
        with pytest.raises(InputError, match="3 workers cannot share 2 shards"):
            owned_shards(rank, 3, 2)
