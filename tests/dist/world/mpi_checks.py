"""What every rank of an MPI world does and checks: `mpiexec -n 3 python -m tests.dist.world.mpi_checks FOLDER`.

All in one script, because ranks take seconds to start: it trains with two backends, checks the operations, and fails on one rank.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from math import inf, nan
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline.compat import process_groups
from paceline.errors import InputError
from paceline.training import trainer
from paceline.training.run import Run
from paceline.training.spec import TrainSpec
from paceline.world import connect, env
from paceline.world.mpi.progress import MpiError
from paceline.world.mpi.reductions import choose
from paceline.world.world import World

MOVED = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
    ),
    *(torch.bool, torch.complex64, torch.complex128),
)


def held(rank: int, dtype: torch.dtype, count: int = 7) -> torch.Tensor:
    """Return what a rank holds: small whole numbers, exact in every type."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 3, (count,), generator=generator).to(dtype)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


def every_type_moves(world: World) -> None:
    rank, size = world.rank, world.size
    for dtype in MOVED:
        everybody = [held(one, dtype) for one in range(size)]
        value = everybody[rank].clone()
        dist.broadcast(value, src=size - 1)
        assert bits(value) == bits(everybody[-1]), dtype
        outputs = [torch.zeros_like(value) for _ in range(size)]
        dist.all_gather(outputs, everybody[rank])
        assert [bits(one) for one in outputs] == [bits(one) for one in everybody], dtype
        single = torch.zeros(size * 7, dtype=dtype)
        process_groups.all_gather_single(single, everybody[rank])
        assert bits(single) == bits(torch.cat(everybody)), dtype
        places = outputs if rank == 1 else None
        dist.gather(everybody[rank], places, dst=1)
        dist.scatter(value, everybody if rank == 1 else None, src=1)
        assert bits(value) == bits(everybody[rank]), dtype
        dist.all_to_all(outputs, [held(10 * rank + one, dtype) for one in range(size)])
        assert [bits(one) for one in outputs] == [bits(held(10 * one + rank, dtype)) for one in range(size)]
        work = dist.irecv(value, src=(rank - 1) % size, tag=5)
        dist.send(everybody[rank], dst=(rank + 1) % size, tag=5)
        work.wait()
        assert bits(value) == bits(everybody[(rank - 1) % size]), dtype


def every_type_is_combined(world: World) -> None:
    """Compare with the rule for each type: MPI's own sums are exact on whole numbers; what torch adds is in rank order."""
    size = world.size
    for dtype in MOVED:
        everybody = [held(one, dtype, 6) for one in range(size)]
        exact = torch.stack([one.to(torch.complex128) for one in everybody]).sum(0)
        expected = (
            (exact != 0) if dtype is torch.bool else exact.real.to(dtype) if not dtype.is_complex else exact
        )
        value = everybody[world.rank].clone()
        dist.all_reduce(value)
        assert bits(value) == bits(expected.to(dtype)), dtype
        value = everybody[world.rank].clone()
        dist.reduce(value, dst=1)
        assert world.rank != 1 or bits(value) == bits(expected.to(dtype)), dtype
        part = torch.empty(2, dtype=dtype)
        process_groups.reduce_scatter_single(part, everybody[world.rank])
        assert bits(part) == bits(expected.to(dtype)[2 * world.rank : 2 * world.rank + 2]), dtype


def halves_are_rounded_after_each_addition(world: World) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e5m2):
        generator = torch.Generator().manual_seed(1)
        everybody = [torch.randn(1001, generator=generator).to(dtype) for _ in range(world.size)]
        expected = everybody[0]
        for one in everybody[1:]:
            expected = (expected.float() + one.float()).to(dtype)
        several = [everybody[world.rank].clone() for _ in range(3)]
        # Several at once: their second steps must be taken in one order on all ranks.
        works = [dist.all_reduce(one, async_op=True) for one in several]
        for work, one in zip(reversed(works), reversed(several), strict=True):
            work.wait()
            assert bits(one) == bits(expected), dtype


def halves_of_two_ranks_have_the_bits_of_gloo(world: World) -> None:
    over_mpi, over_gloo = dist.new_group([0, 1]), dist.new_group([0, 1], backend="gloo")
    if world.rank > 1:
        return
    for dtype in (torch.bfloat16, torch.float16):
        value = torch.randn(1001, generator=torch.Generator().manual_seed(world.rank)).to(dtype)
        other = value.clone()
        dist.all_reduce(value, group=over_mpi)
        dist.all_reduce(other, group=over_gloo)
        assert bits(value) == bits(other), dtype
    dist.destroy_process_group(over_gloo)


def other_operations(world: World) -> None:
    size, rank = world.size, world.rank
    everybody = torch.stack([torch.arange(4.0) + one for one in range(size)])
    for op, expected in (
        (dist.ReduceOp.AVG, everybody.sum(0) / size),
        (dist.ReduceOp.MAX, everybody.amax(0)),
        (dist.ReduceOp.MIN, everybody.amin(0)),
        (dist.ReduceOp.PRODUCT, everybody.prod(0)),
        (dist._make_nccl_premul_sum(0.5), everybody.sum(0) / 2),
    ):
        value = everybody[rank].clone()
        dist.all_reduce(value, op=op)
        assert torch.equal(value, expected), op
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        odd = [[1.0, nan, -0.0, inf], [nan, 2.0, 0.0, -inf], [1.0, 1.0, 0.0, 0.0]]
        held = [torch.tensor(odd[one % 3], dtype=dtype) for one in range(size)]
        for op, expected in (
            (dist.ReduceOp.MIN, functools.reduce(torch.minimum, held)),
            (dist.ReduceOp.MAX, functools.reduce(torch.maximum, held)),
        ):
            value = held[rank].clone()
            dist.all_reduce(value, op=op)
            assert bits(value) == bits(expected), (dtype, op)
    value = everybody[rank].clone()
    dist.distributed_c10d._get_default_group().reduce(value, 1, dist.ReduceOp.MAX).wait()
    assert rank != 1 or torch.equal(value, everybody.amax(0))
    flags = torch.tensor([1 << rank, 7])
    dist.all_reduce(flags, op=dist.ReduceOp.BOR)
    assert flags.tolist() == [(1 << size) - 1, 7]
    for op, dtype in ((dist.ReduceOp.AVG, torch.int64), (dist.ReduceOp.BOR, torch.float32)):
        with raised(InputError):
            choose(op, dtype)


def parts_of_different_sizes(world: World) -> None:
    size, rank = world.size, world.rank
    outputs = [torch.empty(one + 1) for one in range(size)]
    dist.all_gather(outputs, torch.full((rank + 1,), float(rank)))
    assert [one.tolist() for one in outputs] == [[float(one)] * (one + 1) for one in range(size)]
    leaving, coming = list(range(size)), [rank] * size
    received = torch.empty(sum(coming), 2)
    dist.all_to_all_single(received, torch.full((sum(leaving), 2), float(rank)), coming, leaving)
    assert received[:, 0].tolist() == [float(one) for one in range(size) for _ in range(rank)]
    total = torch.empty(rank + 1)
    dist.reduce_scatter(total, [torch.ones(one + 1) for one in range(size)])
    assert total.tolist() == [float(size)] * (rank + 1)
    strided = torch.zeros(2, 3).t()
    dist.broadcast(strided if rank else torch.arange(6.0).view(3, 2).t().contiguous().t(), src=0)
    assert rank == 0 or strided.tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    dist.all_reduce(torch.empty(0))
    lists = [[torch.empty(2), torch.empty(3)] for _ in range(size)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch would have it renamed
        dist.all_gather_coalesced(lists, [torch.full((2,), float(rank)), torch.full((3,), rank + 10.0)])
    assert [(one.tolist(), other.tolist()) for one, other in lists] == [
        ([float(one)] * 2, [one + 10.0] * 3) for one in range(size)
    ]
    # FSDP gathers into memory that the input is a part of.
    whole = torch.full((size,), float(rank))
    process_groups.all_gather_single(whole, whole[rank : rank + 1])
    assert whole.tolist() == [float(one) for one in range(size)]


def messages(world: World) -> None:
    rank, size = world.rank, world.size
    if rank == 0:
        value = torch.empty(1)
        assert {dist.recv(value, tag=3) for _ in range(size - 1)} == set(range(1, size))
        first, second = torch.empty(1), torch.empty(1)
        works = [dist.irecv(first, 1, tag=1), dist.irecv(second, 1, tag=2)]
        for work in works:
            work.wait()
        assert (first.item(), second.item()) == (10.0, 20.0)
    else:
        dist.send(torch.tensor([1.0 * rank]), 0, tag=3)
    if rank == 1:
        works = [dist.isend(torch.tensor([20.0]), 0, tag=2), dist.isend(torch.tensor([10.0]), 0, tag=1)]
        for work in works:
            work.wait()
    # Nobody waits for it beside the training: a thread brings it through.
    large = torch.full((1 << 20,), float(rank))
    came = torch.empty_like(large)
    works = [dist.isend(large, (rank + 1) % size), dist.irecv(came, (rank - 1) % size)]
    until = time.monotonic() + 60
    while not works[1].get_future().done():
        assert time.monotonic() < until
        time.sleep(0.001)
    assert came[-1].item() == (rank - 1) % size
    works[0].wait()


def groups(world: World) -> None:
    several = [dist.new_group([one, (one + 1) % world.size]) for one in range(world.size)]
    for first, group in enumerate(several):
        if world.rank in (first, (first + 1) % world.size):
            value = torch.tensor([world.rank])
            dist.all_reduce(value, group=group)
            assert value.item() == first + (first + 1) % world.size
    for one in several:
        if one is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(one)
    left = dist.new_group(list(range(world.size)))
    halves = torch.ones(1 << 16, dtype=torch.bfloat16)
    work = dist.all_reduce(halves, group=left, async_op=True)
    dist.destroy_process_group(left)
    work.wait()
    assert (halves == world.size).all()
    odd = world.comm.split(world.rank % 2)
    assert odd is not None
    assert odd.all_reduce(torch.ones(1)).item() == odd.size


def engines(world: World) -> None:
    """Compare the gradients of DDP and of FSDP2 with those of all samples on one process."""
    torch.manual_seed(0)
    samples = torch.randn(world.size, 4, 8, dtype=torch.float64)
    for wrap in (lambda model: DistributedDataParallel(model, bucket_cap_mb=1e-4), _sharded):
        torch.manual_seed(1)
        plain = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 6)).double()
        torch.manual_seed(1)
        model = wrap(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 6)).double())
        plain(samples.flatten(0, 1)).pow(2).mean().backward()
        model(samples[world.rank]).pow(2).mean().backward()
        for expected, one in zip(plain.parameters(), model.parameters(), strict=True):
            found = one.grad.full_tensor() if hasattr(one.grad, "full_tensor") else one.grad
            torch.testing.assert_close(found, expected.grad)


def _sharded(model: nn.Sequential) -> nn.Module:
    for one in model:
        fully_shard(one)
    return fully_shard(model)


def wrong_arguments_are_refused_at_once(world: World) -> None:
    for call in (
        lambda: process_groups.all_gather_single(torch.empty(5), torch.empty(2)),
        lambda: process_groups.all_gather_single(
            torch.empty(2 * world.size, dtype=torch.int32), torch.empty(2)
        ),
        lambda: dist.all_to_all_single(torch.empty(7), torch.empty(7)),
        lambda: dist.all_reduce(torch.ones(3).to_sparse()),
    ):
        with raised(InputError):
            call()
    dist.barrier()


def errors_are_one_line_and_raised_by_wait(world: World) -> None:
    """Come last: after an error MPI is not left in an orderly way."""
    value = torch.empty(4)
    if world.rank == 0:
        work = dist.irecv(value, 1)
        with raised(MpiError, "recv of 3 ranks over MPI failed: "):
            work.wait()
    elif world.rank == 1:
        dist.send(torch.empty(2), 0)
    dist.barrier()
    work = dist.irecv(value, (world.rank + 1) % world.size, tag=9)
    with raised(
        MpiError, "did not end within the timeout of 0.2 s: another rank has not come to it, or is gone."
    ):
        work.wait(timedelta(seconds=0.2))


@contextlib.contextmanager
def raised(kind: type[Exception], words: str = "") -> Iterator[None]:
    with pytest.raises(kind, match=re.escape(words) or None) as caught:
        yield
    assert "\n" not in str(caught.value)


CHECKS: tuple[Callable[[World], None], ...] = (
    every_type_moves,
    every_type_is_combined,
    halves_are_rounded_after_each_addition,
    halves_of_two_ranks_have_the_bits_of_gloo,
    other_operations,
    parts_of_different_sizes,
    messages,
    groups,
    engines,
    wrong_arguments_are_refused_at_once,
    errors_are_one_line_and_raised_by_wait,
)


def main() -> None:
    """Train, check everything and say which was checked, and fail."""
    told = [trained(strategy="fsdp", backend="mpi"), trained(backend="gloo")]
    identity = env.identity()
    assert identity is not None
    Path(sys.argv[1], f"told-{identity.rank}.json").write_text(json.dumps(told))
    torch.set_num_threads(1)
    world = connect(identity, backend="mpi", device="cpu", timeout_s=60)
    for check in CHECKS:
        check(world)
        if world.is_first:
            print(check.__name__, flush=True)
    dist.destroy_process_group()
    paceline.launch(fails, backend="mpi")


def trained(**asked: str) -> list[object]:
    """Train on all ranks, and return how and to which weights."""
    spec = TrainSpec(task="paceline.tasks.dense4096:Dense4096", name="it", steps=5)
    (one,) = paceline.launch(trainer.main, spec, shards=4, transport="gloo", **asked)
    return [one["workers"], one["transport"], one["weights_sha256"]]


def fails(run: Run) -> None:
    """Fail on one rank, while the others wait for it."""
    if run.world.rank == 1:
        raise ValueError("this rank cannot go on")
    run.world.comm.all_reduce(torch.ones(3))


if __name__ == "__main__":
    main()
