"""Splitting, joining and leaving, with real processes."""

import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from paceline.transport import store
from paceline.world import (
    Identity,
    LocalComm,
    ProcessGroupComm,
    all_gather_object,
    broadcast_object,
    connect,
)
from paceline.world.env import read
from paceline.world.words import hear, tell
from tests.workers import run_workers


def even_and_odd(world):
    part = world.comm.split(world.rank % 2)
    total = part.all_reduce(torch.tensor([world.rank])).item()
    gathered = part.gather(torch.tensor([world.rank]), root=part.size - 1)
    values = None if gathered is None else [value.item() for value in gathered]
    part.close()
    return part.rank, part.size, total, values


@pytest.mark.parametrize("checked", [False, True], ids=["plain", "checked"])
def test_collectives_inside_the_parts(checked):
    assert run_workers(even_and_odd, 3, checked=checked) == [
        (0, 2, 2, None),
        (0, 1, 1, [1]),
        (1, 2, 2, [0, 2]),
    ]


def words_of_groups(world):
    """The same key in every group: of two groups at once, and of one that forms when others have spoken."""
    heard = []
    for colour in (0 if world.rank < 2 else 1, 0 if world.rank in (1, 2) else 1):
        part = world.comm.split(colour)
        inner = replace(world, rank=part.rank, size=part.size, comm=part)
        if part.rank == 1:
            time.sleep(
                0.2
            )  # until its word is there, what another group said under this key must not count for it
        tell(inner, "word", f"{world.rank}")
        heard.append(
            [
                word
                for _, word in hear(inner, "word", lambda rank, _: RuntimeError(f"rank {rank} said nothing"))
            ]
        )
        world.comm.barrier()
    return heard


def test_a_word_is_heard_in_its_own_group_alone():
    first, second, third, fourth = run_workers(words_of_groups, 4)
    assert first == [["0", "1"], ["0", "3"]]
    assert second == [["0", "1"], ["1", "2"]]
    assert third == [["2", "3"], ["1", "2"]]
    assert fourth == [["2", "3"], ["0", "3"]]


def order_by_key(world):
    part = world.comm.split(0, key=-world.rank)
    return part.rank, [value.item() for value in part.all_gather(torch.tensor([world.rank]))]


def test_the_key_orders_the_ranks():
    assert run_workers(order_by_key, 3) == [(2, [2, 1, 0]), (1, [2, 1, 0]), (0, [2, 1, 0])]


def unequal_histories(world):
    """Ranks that hold different numbers of groups must still agree on the next one."""
    comm, rank = world.comm, world.rank
    pair = comm.split(0 if rank < 2 else None)
    assert (pair is None) == (rank == 2)
    if pair is not None:
        inner = pair.split(0)
        assert inner.all_reduce(torch.ones(1)).item() == 2
        if rank == 0:
            inner.close()
    crossed = comm.split(0 if rank != 1 else None)
    if crossed is not None:
        assert [value.item() for value in crossed.all_gather(torch.tensor([rank]))] == [0, 2]
    return comm.split(5).all_reduce(torch.ones(1)).item()


def test_nested_and_closed_groups_do_not_confuse_later_splits():
    assert run_workers(unequal_histories, 3) == [3, 3, 3]


def ddp_in_a_part(world):
    """Torch's own engines must accept a part's process group."""
    part = world.comm.split(world.rank % 2)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    parallel = torch.nn.parallel.DistributedDataParallel(model, process_group=part.group)

    def hook(state, bucket):
        return state.all_reduce_(bucket.buffer(), "mean").future()

    parallel.register_comm_hook(part, hook)
    parallel(torch.full((1, 1), float(world.rank))).sum().backward()
    return model.weight.grad.item()


def test_ddp_runs_in_a_part_with_our_reduction_as_its_hook():
    assert run_workers(ddp_in_a_part, 3) == [1.0, 1.0, 1.0]


def objects(world):
    mine = {"rank": world.rank, "text": "x" * (10 * world.rank)}
    return all_gather_object(world.comm, mine), broadcast_object(world.comm, mine, root=1)


def test_objects_of_different_lengths():
    everybody = [{"rank": rank, "text": "x" * (10 * rank)} for rank in range(3)]
    assert run_workers(objects, 3) == [(everybody, everybody[1])] * 3


def next_generation(world, port):
    """Two of three regroup on the same store, as after a death."""
    before = world.comm.all_reduce(torch.ones(1)).item()
    world.close()
    if world.rank == 1:
        return before, None, None
    identity = Identity(rank=world.rank // 2, size=2, local_rank=world.rank // 2, local_size=2)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    again = connect(identity, store=store, device="cpu", timeout_s=20, generation=1)
    total = again.comm.all_reduce(torch.ones(1)).item()
    again.close()
    return before, total, again.generation


def test_the_survivors_regroup_under_the_next_generation():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert run_workers(next_generation, 3, store.port) == [(3, 2, 1), (3, None, None), (3, 2, 1)]


def by_master_address(world, port):
    """Meet as under torchrun, where rank 0 keeps the store at the master's port."""
    world.close()
    place = {"rank": world.rank, "local_rank": world.rank}
    identity = Identity(**place, size=2, local_size=2, master_address="localhost", master_port=port)
    again = connect(identity, device="cpu", timeout_s=20)
    total = again.comm.all_reduce(torch.ones(1)).item()
    again.comm.barrier()
    again.close()
    return total, again.backend, read("GLOO_SOCKET_IFNAME") in ("lo", "lo0")


def test_meeting_at_the_master_address():
    free = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = free.port
    del free
    assert run_workers(by_master_address, 2, port) == [(2, "gloo", True)] * 2


def parity(world):
    """A group of one answers exactly as the null object does."""
    part = world.comm.split(world.rank)
    assert isinstance(part, ProcessGroupComm)
    assert part.size == 1
    mine = torch.arange(6.0).reshape(3, 2)
    operations = [
        lambda comm: comm.broadcast(mine),
        lambda comm: comm.reduce(mine, "mean"),
        lambda comm: comm.all_reduce(mine, "product"),
        lambda comm: comm.all_reduce_async(mine, "max").wait(),
        lambda comm: comm.all_reduce_(mine.clone(), "mean").wait(),
        lambda comm: comm.all_reduce_(mine.clone(), "mean").future().wait(),
        lambda comm: comm.gather(mine),
        lambda comm: comm.scatter([mine], like=mine),
        lambda comm: comm.all_gather(mine),
        lambda comm: comm.reduce_scatter([mine], "min"),
        lambda comm: comm.all_to_all([mine]),
        lambda comm: comm.all_to_all([mine], rows=[3]),
        lambda comm: comm.barrier(),
        lambda comm: comm.split(None),
        lambda comm: comm.split(2).all_reduce(mine),
    ]
    for operation in operations:
        torch.testing.assert_close(operation(part), operation(LocalComm()), rtol=0, atol=0)
    mistakes = [
        lambda comm: comm.broadcast(mine, root=1),
        lambda comm: comm.all_reduce(mine.int(), "mean"),
        lambda comm: comm.scatter([], like=mine),
        lambda comm: comm.send(mine, to=0),
    ]
    for mistake in mistakes:
        kinds = []
        for comm in (part, LocalComm()):
            with pytest.raises(Exception, match=r".") as caught:
                mistake(comm)
            kinds.append(caught.type)
        assert kinds[0] is kinds[1]
    return len(operations)


def test_a_group_of_one_and_the_null_object_agree():
    assert run_workers(parity, 2) == [15, 15]


def requests_of_a_split(world):
    before = next(store._numbers)
    part = world.comm.split(0)
    inner = part.split(0)
    return next(store._numbers) - before - 1, inner.size


def test_a_split_asks_the_store_as_often_for_few_as_for_many():
    few, many = (run_workers(requests_of_a_split, workers) for workers in (2, 4))
    assert [size for _, size in many] == [4] * 4
    assert {count for count, _ in few} == {count for count, _ in many}
