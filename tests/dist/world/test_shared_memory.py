"""The shared-memory channel: right sums, no waiting for the dead, nothing left behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline import World
from paceline.compat import futex
from paceline.data import owned_shards
from paceline.errors import WorkerFailedError
from paceline.reduce.exchange import Exchange, Layout, SocketExchange
from paceline.reduce.hosts import HostsExchange, open_shared_memory
from paceline.reduce.shared_memory import SharedMemoryExchange
from paceline.reduce.tree import TreeSum, cover
from paceline.world.shared_memory import PeerLostError, SharedMemoryChannel, open_channel
from tests.workers import run_workers

LENGTHS = (1, 2, 7, 1000, 200_003)


def leaf(shard: int, length: int) -> Tensor:
    """What one shard brings: numbers whose sum depends on the order of the additions."""
    made = torch.Generator().manual_seed(1000 * shard + length)
    return torch.randn(length, generator=made) * 10 ** float(shard % 3)


def node_sum(low: int, high: int, shards: int, length: int) -> Tensor:
    """Add the leaves of one subtree, in the order of the tree."""
    tree = TreeSum(shards)
    for shard in range(low, high):
        tree.add((shard, shard + 1), [leaf(shard, length)])
    (_, (total,)) = tree.nodes[0]
    assert total is not None
    return total


def lane_of(world: World) -> SharedMemoryChannel:
    transport = open_channel(world)
    assert transport is not None
    return transport


def sums(world: World, shards: int, way: str) -> list[list[float]]:
    """Sum tensors of several lengths, all started before the first is finished, twice over."""
    layout = Layout.of_workers(world, shards)
    exchange: Exchange | None = SocketExchange(world.comm, layout)
    if way == "fenced":  # the barriers of a processor that keeps no order, here too
        futex.barrier = futex.full_barrier
    if way in ("memory", "fenced"):
        exchange = SharedMemoryExchange(lane_of(world), layout)
    elif way == "hosts":  # as if the first half of the workers were on one machine and the rest on another
        exchange = open_shared_memory(world, shards, [2 * rank // world.size for rank in range(world.size)])
        assert isinstance(exchange, HostsExchange)
    assert exchange is not None
    owned = owned_shards(world.rank, world.size, shards)
    nodes = cover(owned.start, owned.stop, shards)
    for _ in range(2):
        totals = []
        for key, length in enumerate(LENGTHS):
            parts = [node_sum(low, high, shards, length) for low, high in nodes]
            exchange.start(key, parts, parts[-1], lambda: None)
            totals.append(parts[-1])
        exchange.finish()
    return [total.tolist() for total in totals]


@pytest.mark.parametrize(
    ("way", "workers", "shards"),
    [
        *[
            ("memory", 2, 2),
            ("memory", 3, 8),
            ("memory", 4, 5),
            ("gloo", 3, 8),
            ("gloo", 2, 5),
            ("memory", 6, 6),
        ],
        ("fenced", 3, 8),
        *[("hosts", 4, 4), ("hosts", 4, 8), ("hosts", 4, 7), ("hosts", 6, 13)],
    ],
)
def test_the_sum_is_the_trees_on_every_worker(way: str, workers: int, shards: int) -> None:
    expected = [node_sum(0, shards, shards, length).tolist() for length in LENGTHS]
    for found in run_workers(sums, workers, shards, way):
        assert found == expected


def die_in_the_middle(world: World, note: str) -> None:
    """Rank 1 is killed between arriving and adding; rank 0 must not wait for it."""
    transport = lane_of(world)
    transport.post(0, 1)
    transport.wait(0, 1)
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    try:
        transport.wait(1, 1)
    except PeerLostError as error:
        Path(note).write_text(f"{time.monotonic() - started} {error}")
        raise


def test_a_dead_peer_ends_the_wait_at_once(tmp_path: Path) -> None:
    note = tmp_path / "note"
    with pytest.raises(WorkerFailedError, match=r"rank 1 .* SIGKILL"):
        run_workers(die_in_the_middle, 2, str(note))
    seconds, words = note.read_text().split(" ", 1)
    # The wait itself would give up after 300 s; a busy machine may take a moment.
    assert float(seconds) < 30.0
    assert "rank 1" in words


def count_far(world: World) -> int:
    transport = lane_of(world)
    for value in (2**32 - 1, 2**32, 2**32 + 1):
        transport.post(0, value)
        transport.wait(0, value)
    return value


def test_a_flag_counts_beyond_four_bytes() -> None:
    assert run_workers(count_far, 2) == [2**32 + 1] * 2


def give_up(world: World) -> str:
    transport = open_channel(world, timeout_s=0.3)
    assert transport is not None
    if world.rank == 0:
        try:
            transport.wait(0, 1)
        except PeerLostError as error:
            world.comm.barrier()
            return str(error)
    world.comm.barrier()
    return ""


def test_a_peer_that_never_comes_is_named() -> None:
    words, _ = run_workers(give_up, 2)
    assert "timed out waiting for rank 1" in words
