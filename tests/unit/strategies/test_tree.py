"""The order of additions is the tree's, whoever holds the shards and in whatever portions they come."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.data import owned_shards
from paceline.reduce.tree import Gradients, Subtree, TreeSum, add, cover, splits

SHARDS = st.integers(1, 70)


def written_out(low: int, high: int) -> str:
    """Define the tree: left of each node the largest power of two of shards that leaves some for the right."""
    if high - low == 1:
        return str(low)
    left = 1
    while 2 * left < high - low:
        left *= 2
    return f"({written_out(low, low + left)}+{written_out(low + left, high)})"


class Traced:
    """Adds the names of shards instead of numbers, by the same stack: what is added to what can be read."""

    def __init__(self, shards: int) -> None:
        self.text = {(shard, shard + 1): str(shard) for shard in range(shards)}
        self.tree = TreeSum(shards)

    def add(self, node: Subtree) -> None:
        """Put a node in, and write down every addition that follows from it."""
        before = [node for node, _ in self.tree.nodes]
        self.tree.add(node, [])
        parts = [*before, node]
        while len(parts) > len(self.tree.nodes):
            right, left = parts.pop(), parts.pop()
            merged = (left[0], right[1])
            self.text[merged] = f"({self.text[left]}+{self.text[right]})"
            parts.append(merged)


@given(SHARDS)
def test_shards_one_by_one(shards: int) -> None:
    traced = Traced(shards)
    for shard in range(shards):
        traced.add((shard, shard + 1))
        assert len(traced.tree.nodes) <= shards.bit_length()
    assert [node for node, _ in traced.tree.nodes] == [(0, shards)]
    assert traced.text[0, shards] == written_out(0, shards)


@given(SHARDS, st.data())
def test_workers_first_then_the_nodes_they_made(shards: int, data: st.DataObject) -> None:
    workers = data.draw(st.integers(1, shards))
    whole = Traced(shards)
    for rank in range(workers):
        owned = owned_shards(rank, workers, shards)
        mine = Traced(shards)
        for shard in owned:
            mine.add((shard, shard + 1))
        nodes = [node for node, _ in mine.tree.nodes]
        assert nodes == cover(owned.start, owned.stop, shards)
        for node in nodes:
            whole.text[node] = mine.text[node]
            whole.add(node)
    assert whole.text[0, shards] == written_out(0, shards)


@given(SHARDS, st.data())
def test_cover_is_the_fewest_nodes(shards: int, data: st.DataObject) -> None:
    low = data.draw(st.integers(0, shards))
    high = data.draw(st.integers(low, shards))
    nodes = cover(low, high, shards)
    assert [shard for start, stop in nodes for shard in range(start, stop)] == list(range(low, high))
    tree = {(0, shards), *((shard, shard + 1) for shard in range(shards))}
    for (start, stop), middle in splits(shards).items():
        tree |= {(start, middle), (middle, stop)}
    assert tree >= set(nodes)
    merged = {(left[0], right[1]) for left, right in pairwise(nodes)}
    assert not merged & tree, "two neighbours make one node"


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=40))
def test_the_sum_of_real_tensors(values: list[float]) -> None:
    tree = TreeSum(len(values))
    for shard, value in enumerate(values):
        tree.add((shard, shard + 1), [torch.tensor([value], dtype=torch.float64)])
    [(_, [total])] = tree.nodes
    assert total is not None
    exact = sum(map(Fraction, values))
    # Sums of float32 numbers below 2^20 in float64: each addition rounds by 2^-53 of at most 40 * 2^20.
    assert abs(Fraction(total.item()) - exact) <= Fraction(len(values) * 40 * 2**20, 2**53)


def test_missing_gradients_add_nothing() -> None:
    one, two = torch.tensor([1.0]), torch.tensor([2.0])
    left: Gradients = [one.clone(), None, None]
    summed = add(left, [two, two, None, one])
    assert [None if part is None else part.item() for part in summed] == [3.0, 2.0, None, 1.0]
    assert [part.item() for part in add([one.clone(), two.clone()], [two]) if part is not None] == [3.0, 2.0]


@pytest.mark.parametrize("shards", [1, 2, 3, 8])
def test_splits_are_the_inner_nodes(shards: int) -> None:
    assert len(splits(shards)) == shards - 1
