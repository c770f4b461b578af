"""Every operation on real workers, against what plain torch computes from everybody's input."""

import pytest
import torch

from paceline.errors import InputError, PacelineError
from tests.workers import run_workers

OPS = {
    "sum": lambda stack: stack.sum(0),
    "mean": lambda stack: stack.sum(0) / len(stack),
    "min": lambda stack: stack.amin(0),
    "max": lambda stack: stack.amax(0),
    "product": lambda stack: stack.prod(0),
}


def held_by(rank, size, dtype=torch.float64):
    """What a rank holds: two rows of small whole numbers, exact in every type."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(1, 5, (2, size), generator=generator).to(dtype)


def check_unchanged(tensor, rank, size):
    assert torch.equal(tensor, held_by(rank, size, tensor.dtype)), "the input was changed"


def all_collectives(world):
    comm, rank, size = world.comm, world.rank, world.size
    mine, last = held_by(rank, size), size - 1
    everybody = torch.stack([held_by(other, size) for other in range(size)])
    assert torch.equal(comm.broadcast(mine, root=last), everybody[last])
    for op, expected in OPS.items():
        assert torch.equal(comm.all_reduce(mine, op), expected(everybody)), op
        reduced = comm.reduce(mine, op, root=last)
        assert reduced is None if rank != last else torch.equal(reduced, expected(everybody)), op
        part = comm.reduce_scatter(list(mine.unbind(1)), op)
        assert torch.equal(part, expected(everybody)[:, rank]), op
    gathered = comm.gather(mine, root=last)
    assert gathered is None if rank != last else torch.equal(torch.stack(gathered), everybody)
    assert torch.equal(torch.stack(comm.all_gather(mine)), everybody)
    columns = list(mine.unbind(1)) if rank == last else None
    assert torch.equal(comm.scatter(columns, like=mine[:, 0], root=last), everybody[last][:, rank])
    exchanged = comm.all_to_all(list(mine.unbind(1)))
    assert torch.equal(torch.stack(exchanged), everybody[:, :, rank])
    comm.barrier()
    check_unchanged(mine, rank, size)
    return rank


@pytest.mark.parametrize("checked", [False, True], ids=["plain", "checked"])
@pytest.mark.parametrize("workers", [2, 3])
def test_collectives(workers, checked):
    assert run_workers(all_collectives, workers, checked=checked) == list(range(workers))


def views_are_sent_as_they_read(world):
    comm, rank, size = world.comm, world.rank, world.size

    def held(one):
        return torch.complex(torch.arange(4.0) + one, torch.arange(4.0) - one)

    for view in (lambda x: x.conj(), lambda x: x.conj().imag, lambda x: x.view(2, 2).t(), lambda x: x[::2]):
        every = [view(held(one)) for one in range(size)]
        mine, plain = view(held(rank)), [one.clone().resolve_conj().resolve_neg() for one in every]
        assert torch.equal(comm.broadcast(mine, root=1), plain[1])
        assert all(map(torch.equal, comm.all_gather(mine), plain))
        if not mine.is_complex():
            assert torch.equal(comm.all_reduce(mine), sum(plain))
            assert torch.equal(comm.reduce_scatter(every), plain[rank] * size)
        gathered = comm.gather(mine, root=0)
        assert gathered is None if rank else all(map(torch.equal, gathered, plain))
        assert torch.equal(comm.scatter(every if rank == 0 else None, like=mine, root=0), plain[rank])
        assert all(map(torch.equal, comm.all_to_all([mine] * size), plain))
        pending = comm.irecv(like=mine, source=1 - rank)
        comm.send(mine, 1 - rank)
        assert torch.equal(pending.wait(), plain[1 - rank])


def test_views_are_sent_as_they_read():
    run_workers(views_are_sent_as_they_read, 2)


def uneven_all_to_all(world):
    comm, rank, size = world.comm, world.rank, world.size
    parts = [torch.full((rank + to, 2), 10.0 * rank + to) for to in range(size)]
    expected = [torch.full((source + rank, 2), 10.0 * source + rank) for source in range(size)]
    rows = [len(part) for part in expected]
    for received in (comm.all_to_all(parts), comm.all_to_all(parts, rows=rows)):
        assert [tuple(part.shape) for part in received] == [tuple(part.shape) for part in expected]
        assert all(torch.equal(one, other) for one, other in zip(received, expected, strict=True))


def test_all_to_all_with_uneven_and_empty_parts():
    run_workers(uneven_all_to_all, 3)


def every_type_travels(world):
    comm, rank = world.comm, world.rank
    for dtype in (
        torch.bool,
        torch.int16,
        torch.float8_e4m3fn,
        torch.bfloat16,
        torch.complex64,
        torch.uint16,
    ):
        mine = torch.tensor([rank, 1]).to(dtype)
        both = [torch.tensor([other, 1]).to(dtype) for other in range(2)]
        for found in (
            comm.all_gather(mine),
            comm.all_to_all([comm.broadcast(both[rank], r)[None] for r in (0, 1)]),
        ):
            assert len(found) == 2
            assert all(value.dtype == dtype for value in found)
        assert [value.tolist() for value in map(torch.Tensor.cfloat, comm.all_gather(mine))] == [
            value.tolist() for value in map(torch.Tensor.cfloat, both)
        ]
    assert comm.all_reduce(torch.tensor([rank == 1, True]), "min").tolist() == [False, True]
    for shape in ((), (0,), (3, 0)):
        assert [tuple(value.shape) for value in comm.all_gather(torch.zeros(shape))] == [shape, shape]
    spread = torch.arange(6.0).reshape(2, 3).t()
    assert not spread.is_contiguous()
    assert torch.equal(comm.all_reduce(spread), 2 * spread)
    assert torch.equal(comm.broadcast(spread), spread)
    assert comm.all_reduce(torch.ones(2, requires_grad=True)).requires_grad is False


def test_types_shapes_and_strides():
    run_workers(every_type_travels, 2)


def asynchronous(world):
    comm, rank, size = world.comm, world.rank, world.size
    mine = torch.full((1000,), float(rank + 1))
    total = size * (size + 1) / 2
    pending = comm.all_reduce_async(mine, "sum")
    assert torch.equal(pending.wait(), torch.full((1000,), total))
    assert torch.equal(mine, torch.full((1000,), float(rank + 1)))
    assert pending.done()
    for op, expected in (("sum", total), ("mean", total / size)):
        buffer = mine.clone()
        pending = comm.all_reduce_(buffer, op)
        first, second, third = pending.future().wait(), pending.wait(), pending.wait()
        for value in (buffer, first, second, third):
            assert torch.equal(value, torch.full((1000,), expected)), op
            assert value.data_ptr() == buffer.data_ptr(), "a bucket must not be copied"


def test_asynchronous_reductions():
    run_workers(asynchronous, 3)


def point_to_point(world):
    comm, rank, size = world.comm, world.rank, world.size
    following, previous = (rank + 1) % size, (rank - 1) % size
    sending = [comm.isend(torch.full((4,), float(10 * rank + n)), following) for n in range(3)]
    receiving = [comm.irecv(like=torch.empty(4), source=previous) for _ in range(3)]
    values = [pending.wait() for pending in reversed(receiving)]
    assert [value[0].item() for value in reversed(values)] == [10 * previous + n for n in range(3)]
    for pending in sending:
        pending.wait()
        pending.wait()
    if rank == 0:
        comm.send(torch.tensor(7), to=size - 1)
    if rank == size - 1:
        assert comm.recv(like=torch.tensor(0), source=0).item() == 7


@pytest.mark.parametrize("checked", [False, True], ids=["plain", "checked"])
def test_messages_between_two(checked):
    run_workers(point_to_point, 3, checked=checked)


def poll(world):
    comm, rank = world.comm, world.rank
    if rank == 0:
        pending = comm.irecv(like=torch.empty(2), source=1)
        early = pending.done()
        comm.barrier()
        while not pending.done():
            pass
        return early, pending.wait().tolist()
    comm.barrier()
    pending = comm.isend(torch.tensor([1.0, 2.0]), to=0)
    while not pending.done():
        pass
    return pending.wait()


@pytest.mark.parametrize("checked", [False, True], ids=["plain", "checked"])
def test_asking_whether_a_message_is_through(checked):
    assert run_workers(poll, 2, checked=checked) == [(False, [1.0, 2.0]), None]


def refusals(world):
    comm, rank = world.comm, world.rank
    cases = [
        (lambda: comm.broadcast(torch.ones(1), root=2), "root is 2"),
        (lambda: comm.all_reduce(torch.ones(1, dtype=torch.int64), "mean"), "divide"),
        (lambda: comm.all_gather(torch.ones(1)) and comm.send(torch.ones(1), to=rank), "own partner"),
        (lambda: comm.reduce_scatter([torch.ones(1), torch.ones(2)]), "equal tensors"),
        (lambda: comm.reduce_scatter([torch.ones(1)]), "1 tensors for 2"),
        (lambda: comm.all_to_all([torch.ones(1), torch.ones(1, 2)]), "first dimension"),
        (lambda: comm.all_to_all([torch.ones(1), torch.ones(1)], rows=[1]), "1 numbers of rows"),
        (lambda: comm.all_to_all([torch.ones(1), torch.ones(1).int()]), "several types"),
        (lambda: comm.split(-1), "colour"),
    ]
    for call, words in cases:
        with pytest.raises(InputError, match=words):
            call()
    world.close()
    with pytest.raises(PacelineError, match="closed"):
        comm.barrier()
    world.close()


def test_wrong_arguments_are_refused_before_anything_is_sent():
    run_workers(refusals, 2)
