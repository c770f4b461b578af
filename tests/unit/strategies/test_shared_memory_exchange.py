"""Sums and weights in shared memory: right however often a place is used again, and bounded whatever the model's size."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.data import owned_shards
from paceline.errors import InputError
from paceline.reduce import shared_memory
from paceline.reduce.exchange import Layout
from paceline.reduce.gather import SharedMemoryGather, Wait
from paceline.reduce.shared_memory import SharedMemoryExchange
from paceline.reduce.shared_memory_scatter import SharedMemoryScatter
from paceline.reduce.tree import TreeSum, cover
from paceline.world.shared_memory import SharedMemoryChannel

WORKERS = 3
CPU = torch.device("cpu")
Found = TypeVar("Found")


def together(job: Callable[[SharedMemoryChannel], Found]) -> list[Found]:
    """Let workers that share memory do a job, each on a thread of its own."""
    # Windows into one anonymous file: every worker maps it itself.
    descriptor = os.memfd_create("transport")
    os.ftruncate(descriptor, 1 << 26)
    lanes = [
        SharedMemoryChannel(mmap.mmap(descriptor, 1 << 26), rank, [os.getpid()] * WORKERS, 60.0)
        for rank in range(WORKERS)
    ]
    os.close(descriptor)
    with ThreadPoolExecutor(WORKERS) as pool:
        return list(pool.map(job, lanes))


def leaf(shard: int, step: int, length: int) -> Tensor:
    made = torch.Generator().manual_seed(100 * step + 10 * length + shard)
    return torch.randn(length, generator=made) * 10 ** float(shard % 3)


def node_sum(low: int, high: int, shards: int, step: int, length: int) -> Tensor:
    """Add the leaves of one subtree, in the order of the tree."""
    tree = TreeSum(shards)
    for shard in range(low, high):
        tree.add((shard, shard + 1), [leaf(shard, step, length)])
    (_, (total,)) = tree.nodes[0]
    assert total is not None
    return total


def brought(transport: SharedMemoryChannel, shards: int, step: int, length: int) -> list[Tensor]:
    owned = owned_shards(transport.rank, WORKERS, shards)
    nodes = cover(owned.start, owned.stop, shards)
    return [node_sum(low, high, shards, step, length) for low, high in nodes]


def layout_of(transport: SharedMemoryChannel, shards: int) -> Layout:
    return Layout(transport.rank, [owned_shards(rank, WORKERS, shards) for rank in range(WORKERS)], shards)


def test_one_that_has_left_the_loop_is_not_waited_for_but_for_what_it_posted() -> None:
    descriptor = os.memfd_create("transport")
    os.ftruncate(descriptor, 1 << 26)

    def absent(rank: int) -> None:
        peer.post(0, 1)  # it does so before it leaves, and after the wait has looked
        raise InputError(f"rank {rank} has left")

    peer = SharedMemoryChannel(mmap.mmap(descriptor, 1 << 26), 1, [os.getpid()] * 2, 60.0)
    mine = SharedMemoryChannel(mmap.mmap(descriptor, 1 << 26), 0, [os.getpid()] * 2, 60.0, absent)
    os.close(descriptor)
    mine.wait(0, 1)
    with pytest.raises(InputError, match="rank 1 has left"):
        mine.wait(0, 2)


# The exchange of ddp.

LENGTHS = (700, 30, 2500, 1, 400)
STEPS = 5


def exchanged(transport: SharedMemoryChannel, shards: int) -> tuple[list[list[Tensor]], int]:
    exchange = SharedMemoryExchange(transport, layout_of(transport, shards))
    before = transport.reserve(0)
    kept = [torch.empty(length) for length in LENGTHS]
    found = []
    for step in range(STEPS):
        done: list[int] = []
        for key, (target, length) in enumerate(zip(kept, LENGTHS, strict=True)):
            *others, last = brought(transport, shards, step, length)
            target.copy_(last)  # the same memory every step, as torch's buckets are
            exchange.start(key, [*others, target], target, partial(done.append, key))
        exchange.finish()
        assert done == list(range(len(LENGTHS)))
        found.append([target.clone() for target in kept])
    return found, transport.reserve(0) - before


@pytest.mark.parametrize("small", [0, 2000, shared_memory.SMALL])
@pytest.mark.parametrize("shards", [3, 8])
def test_sums_larger_than_the_room_go_through_it_in_turns(
    monkeypatch: pytest.MonkeyPatch, shards: int, small: int
) -> None:
    monkeypatch.setattr(shared_memory, "ROOM", 4096)
    monkeypatch.setattr(shared_memory, "SMALL", small)  # up to which a worker adds up all of a tensor itself
    expected = [[node_sum(0, shards, shards, step, length) for length in LENGTHS] for step in range(STEPS)]
    for found, grown in together(partial(exchanged, shards=shards)):
        assert grown == 0
        assert all(
            torch.equal(one, other)
            for mine, right in zip(found, expected, strict=True)
            for one, other in zip(mine, right, strict=True)
        )


# The messages of fsdp.


def scattered(transport: SharedMemoryChannel, shards: int, parts: int) -> list[Tensor]:
    scatter = SharedMemoryScatter(transport, layout_of(transport, shards), parts)
    scatter.reserve(0)
    found = []
    lengths = (3 * parts, 70_000 * parts, 70_000 * parts)
    # Made beforehand, so that nothing but the exchange keeps a worker from running ahead of the others.
    made = [[brought(transport, shards, step, length) for length in lengths] for step in range(STEPS)]
    for step in range(STEPS):
        for length, sums in zip(lengths, made[step], strict=True):
            room = scatter.room(0, length, torch.float32, CPU)
            sums[0] = room.copy_(sums[0])
            found.append(torch.empty(length // parts))
            scatter.start(sums, found[-1])
        found.append(scatter.add_small(brought(transport, shards, step, 2)))
    return found


@pytest.mark.parametrize(("shards", "parts"), [(3, 3), (8, 3), (5, 1)])
def test_each_part_is_added_along_the_tree(monkeypatch: pytest.MonkeyPatch, shards: int, parts: int) -> None:
    monkeypatch.setattr("paceline.reduce.shared_memory_scatter.SMALLEST", 4 * 70_000 * parts)
    for rank, found in enumerate(together(partial(scattered, shards=shards, parts=parts))):
        expected = []
        for step in range(STEPS):
            for length in (3 * parts, 70_000 * parts, 70_000 * parts):
                whole = node_sum(0, shards, shards, step, length)
                expected.append(whole.chunk(parts)[rank % parts])
            expected.append(node_sum(0, shards, shards, step, 2))
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def gathered(transport: SharedMemoryChannel, sizes: Sequence[int]) -> list[Tensor]:
    """Gather messages with one in flight while another is copied out, as torch does on the way back."""
    gather = SharedMemoryGather(transport)
    gather.reserve(4 * WORKERS * max(sizes))
    group = dist.ProcessGroup(0, 1)  # nobody is asked
    found: list[Tensor] = []
    waiting: list[tuple[Tensor, Wait]] = []
    for number, size in enumerate(sizes):
        message = gather.room(WORKERS * size, torch.float32, CPU)
        rows = message[transport.rank * size : (transport.rank + 1) * size].fill_(
            10 * number + transport.rank
        )
        work = gather.start(message, rows, group, later=False)
        assert work is not None
        waiting.append((message, work))
        if len(waiting) > number % 2:
            for one, coming in waiting:
                coming()
                found.append(one.clone())
            waiting = []
    return found + [one.clone() for one, coming in waiting if coming()]


def test_a_message_stays_until_everybody_has_read_it() -> None:
    sizes = [1 + 37 * number % 500 for number in range(60)]
    expected = [
        torch.cat([torch.full((size,), float(10 * number + rank)) for rank in range(WORKERS)])
        for number, size in enumerate(sizes)
    ]
    for found in together(partial(gathered, sizes=sizes)):
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def gathered_late(transport: SharedMemoryChannel) -> list[Tensor]:
    """Gather messages of which every third is not waited for before the end, as torch does for blocks that are not trained."""
    gather = SharedMemoryGather(transport)
    gather.reserve(4 * WORKERS)
    found: dict[int, Tensor] = {}
    late: dict[int, tuple[Tensor, Wait]] = {}
    for number in range(12):
        message = gather.room(WORKERS, torch.float32, CPU)
        message[transport.rank] = 10 * number + transport.rank
        work = gather.start(message, message[transport.rank], dist.ProcessGroup(0, 1), later=False)
        assert work is not None
        if number % 3 == 0:
            late[number] = (message, work)
        else:
            work()
            found[number] = message.clone()
    for number, (message, work) in late.items():
        work()
        found[number] = message.clone()
    return [found[number] for number in range(12)]


def test_a_message_that_nobody_waits_for_is_set_aside() -> None:
    expected = [[10.0 * number + rank for rank in range(WORKERS)] for number in range(12)]
    for found in together(gathered_late):
        assert [one.tolist() for one in found] == expected


# What a step of ddp leaves behind.


def entries(run: paceline.Run) -> list[tuple[Tensor, Tensor]]:
    model = nn.Linear(1, 1)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    found = []
    for step in run.steps(TensorDataset(torch.arange(32.0)), batch_size=8, steps=3):
        result = step.compute(lambda model, batch: paceline.Loss.mean(model(batch[0][:, None])[:, 0]))
        entry = result.state()["entry"]
        assert (
            entry.untyped_storage().nbytes() == entry.nbytes
        )  # and not a bucket's, kept alive for two numbers
        found.append((entry, entry.clone()))
    return found


def test_the_sums_of_a_step_stay_when_the_next_one_is_taken() -> None:
    for found in paceline.launch(entries, strategy="ddp", workers=2, threads=1, device="cpu"):
        assert all(torch.equal(entry, then) for entry, then in found)
        assert len({tuple(then.tolist()) for _, then in found}) == 3
