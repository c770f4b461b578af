"""Sums after the backward pass: the bits of one tree of additions, for any number of workers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.data import owned_shards
from paceline.reduce import post_backward
from paceline.reduce.tree import Gradients, TreeSum
from paceline.world import World
from tests.workers import run_workers

SHARDS = 5
SHAPES = [
    ((3, 4), torch.float32),
    ((7,), torch.float64),
    ((), torch.float32),
    ((300,), torch.float32),
    ((2,), torch.float32),
]
ABSENT = 4
"""A gradient that nobody has."""


def gradients(shard: int, step: int) -> Gradients:
    """Give what a shard comes to; some have no gradient here and there, one has nothing at all, lists end early."""
    if shard == 3:
        return []
    draw = torch.Generator().manual_seed(100 * step + shard)
    made: Gradients = [torch.randn(shape, dtype=dtype, generator=draw) for shape, dtype in SHAPES]
    made[ABSENT] = None
    if shard % 2:
        made[1] = None
    return made


def tree_of(shards: range, step: int) -> TreeSum:
    tree = TreeSum(SHARDS)
    for shard in shards:
        tree.add((shard, shard + 1), gradients(shard, step))
    return tree


def work(world: World, transport: str) -> list[list[Tensor | None]]:
    post_backward.BUCKET = 1024  # several buckets
    like = [torch.empty(shape, dtype=dtype) for shape, dtype in SHAPES]
    sums = post_backward.PostBackwardReduce(world, SHARDS, transport)
    owned = owned_shards(world.rank, world.size, SHARDS)
    # Memory is used again in the next step, so what is kept must be a copy.
    return [
        [None if one is None else one.clone() for one in sums.sum(tree_of(owned, step), like)]
        for step in (0, 1)
    ]


@pytest.mark.parametrize(("workers", "transport"), [(1, "auto"), (2, "auto"), (3, "gloo")])
def test_the_sum_of_one_process_to_the_bit(workers: int, transport: str) -> None:
    for totals in run_workers(work, workers, transport):
        for step, total in enumerate(totals):
            wanted = tree_of(range(SHARDS), step).nodes[0][1]
            assert len(total) == len(SHAPES)
            assert total[ABSENT] is None
            for place, (one, other) in enumerate(zip(total, wanted, strict=True)):
                assert (one is None and other is None) or torch.equal(one, other), place
