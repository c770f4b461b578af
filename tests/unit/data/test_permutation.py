"""The order is a bijection, a pure function of its key, looks random, and costs no memory."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data import EpochPermutation


@settings(deadline=None)
@given(samples=st.integers(1, 3000), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 10**6))
def test_every_sample_has_exactly_one_position(samples: int, seed: int, epoch: int) -> None:
    indices = EpochPermutation(samples, seed).indices(epoch, 0, samples)
    assert indices.dtype == np.int64
    assert sorted(indices.tolist()) == list(range(samples))


@settings(deadline=None)
@given(samples=st.integers(1, 10**18), data=st.data())
def test_position_undoes_indices(samples: int, data: st.DataObject) -> None:
    order = EpochPermutation(samples, seed=11)
    place = data.draw(st.integers(0, samples - 1))
    index = int(order.indices(2, place, place + 1)[0])
    assert 0 <= index < samples
    assert order.position(2, index) == place


@settings(deadline=None)
@given(samples=st.integers(1, 500), data=st.data())
def test_a_slice_is_the_same_as_the_whole(samples: int, data: st.DataObject) -> None:
    order = EpochPermutation(samples, seed=3)
    start = data.draw(st.integers(0, samples))
    stop = data.draw(st.integers(start, samples))
    whole = order.indices(5, 0, samples)
    assert order.indices(4, 0, samples).size == samples  # another epoch in between must not matter
    np.testing.assert_array_equal(order.indices(5, start, stop), whole[start:stop])
    np.testing.assert_array_equal(
        EpochPermutation(samples, seed=3).at(5, np.array([start % samples])), whole[[start % samples]]
    )


def test_a_million_million_samples_cost_no_memory() -> None:
    order = EpochPermutation(10**12, seed=1)
    tracemalloc.start()
    try:
        far = order.indices(0, 10**12 - 4096, 10**12)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2**20
    assert len(np.unique(far)) == 4096
    assert far.min() >= 0
    assert far.max() < 10**12
    assert far.min() < 10**11 < 9 * 10**11 < far.max()


def test_without_shuffle_the_order_is_the_data_sets() -> None:
    np.testing.assert_array_equal(
        EpochPermutation(100, seed=1, shuffle=False).indices(3, 10, 20), np.arange(10, 20)
    )


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (0, 11), (10, 12)])
def test_positions_outside_the_epoch_are_refused(start: int, stop: int) -> None:
    with pytest.raises(IndexError, match="outside an epoch of 10 samples"):
        EpochPermutation(10, seed=0).indices(0, start, stop)


def deviations(counts: np.ndarray, expected: float, freedom: int) -> float:
    """How many standard deviations a chi-square statistic lies from what chance gives."""
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return (statistic - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("samples", [3, 5, 8, 17, 64])
def test_over_many_epochs_samples_land_everywhere_and_next_to_everybody(samples: int) -> None:
    epochs = 1500
    order = EpochPermutation(samples, seed=5)
    orders = np.stack([order.indices(epoch, 0, samples) for epoch in range(epochs)])

    places = np.stack([np.bincount(column, minlength=samples) for column in orders.T])
    assert abs(deviations(places, epochs / samples, (samples - 1) ** 2)) < 5

    neighbours = np.zeros((samples, samples))
    np.add.at(neighbours, (orders[:, :-1].ravel(), orders[:, 1:].ravel()), 1)
    pairs = neighbours[~np.eye(samples, dtype=bool)]
    assert abs(deviations(pairs, epochs / samples, samples * (samples - 1) - 1)) < 5

    # A random permutation has one fixed point on average, with variance one; two epochs share one.
    fixed_points = (orders == np.arange(samples)).sum(1).mean()
    repeated = (orders[1:] == orders[:-1]).sum(1).mean()
    assert fixed_points == pytest.approx(1, abs=5 / math.sqrt(epochs))
    assert repeated == pytest.approx(1, abs=5 / math.sqrt(epochs))


def test_neighbours_in_a_large_epoch_are_unrelated() -> None:
    samples, cells = 1_000_007, 64
    order = EpochPermutation(samples, seed=3)
    first, second = (order.indices(epoch, 0, 200_000) * cells // samples for epoch in (0, 1))
    for left, right in ((first[:-1], first[1:]), (first, second)):
        counts = np.bincount(left * cells + right, minlength=cells**2)
        assert abs(deviations(counts, len(left) / cells**2, cells**2 - 1)) < 5


def test_seed_and_epoch_each_change_the_order() -> None:
    reference = EpochPermutation(1000, seed=1).indices(0, 0, 1000)
    for other in (
        EpochPermutation(1000, seed=2).indices(0, 0, 1000),
        EpochPermutation(1000, seed=1).indices(1, 0, 1000),
    ):
        assert (reference == other).mean() < 0.02
