import pytest
import torch

from paceline.errors import InputError, UnknownNameError
from paceline.world import (
    CheckedComm,
    Identity,
    LocalComm,
    all_gather_object,
    alone,
    broadcast_object,
    connect,
)


@pytest.fixture(params=[LocalComm, lambda: CheckedComm(LocalComm())], ids=["plain", "checked"])
def comm(request):
    return request.param()


@pytest.mark.parametrize(
    "operate",
    [
        lambda comm, tensor: comm.broadcast(tensor),
        lambda comm, tensor: comm.reduce(tensor),
        lambda comm, tensor: comm.all_reduce(tensor, "mean"),
        lambda comm, tensor: comm.all_reduce_async(tensor, "max").wait(),
        lambda comm, tensor: comm.gather(tensor)[0],
        lambda comm, tensor: comm.scatter([tensor], like=tensor),
        lambda comm, tensor: comm.all_gather(tensor)[0],
        lambda comm, tensor: comm.reduce_scatter([tensor]),
        lambda comm, tensor: comm.all_to_all([tensor])[0],
    ],
)
def test_every_operation_gives_a_copy(comm, operate):
    tensor = torch.arange(6.0).reshape(2, 3).requires_grad_()
    value = operate(comm, tensor)
    assert torch.equal(value, tensor)
    assert not value.requires_grad
    value.zero_()
    assert tensor.sum() == 15


def test_in_place_gives_the_tensor_itself(comm):
    tensor = torch.ones(3)
    pending = comm.all_reduce_(tensor, "sum")
    assert pending.done()
    assert pending.wait() is tensor
    assert pending.future().wait() is tensor


def test_wrong_arguments_are_refused(comm):
    tensor = torch.ones(2)
    with pytest.raises(InputError, match="root is 1"):
        comm.broadcast(tensor, root=1)
    with pytest.raises(UnknownNameError, match="product"):
        comm.all_reduce(tensor, "prodct")
    with pytest.raises(InputError, match="2 tensors for 1 workers"):
        comm.all_to_all([tensor, tensor])
    with pytest.raises(InputError, match="without dimensions"):
        comm.all_to_all([torch.tensor(1.0)])
    with pytest.raises(InputError, match="contiguous"):
        comm.all_reduce_(torch.ones(2, 3).t())
    with pytest.raises(InputError, match="0 tensors"):
        comm.scatter(None, like=tensor)


@pytest.mark.parametrize(
    ("operation", "arguments"),
    [
        ("send", {"tensor": torch.ones(1), "to": 0}),
        ("isend", {"tensor": torch.ones(1), "to": 0}),
        ("recv", {"like": torch.ones(1), "source": 0}),
        ("irecv", {"like": torch.ones(1), "source": 0}),
    ],
)
def test_there_is_nobody_to_talk_to(comm, operation, arguments):
    with pytest.raises(InputError, match="no partner"):
        getattr(comm, operation)(**arguments)


@pytest.mark.parametrize(
    ("dtype", "op"),
    [
        (torch.int64, "mean"),
        (torch.bool, "sum"),
        (torch.int16, "sum"),
        (torch.complex64, "sum"),
        (torch.float8_e4m3fn, "max"),
    ],
)
def test_types_that_no_backend_reduces_are_refused_here_too(comm, dtype, op):
    with pytest.raises(InputError, match="cannot be computed"):
        comm.all_reduce(torch.zeros(2, dtype=dtype), op)


def test_split(comm):
    assert comm.split(None) is None
    part = comm.split(3)
    assert (part.rank, part.size) == (0, 1)
    assert torch.equal(part.all_reduce(torch.ones(1)), torch.ones(1))


def test_objects(comm):
    assert all_gather_object(comm, {"a": [1, None]}) == [{"a": [1, None]}]
    assert broadcast_object(comm, ("b", 2.5)) == ("b", 2.5)


def test_alone():
    world = alone()
    assert (world.rank, world.size, world.backend, world.is_first) == (0, 1, "local", True)
    assert world.comm.group is None
    assert "rank 0 of 1" in world.describe()
    world.close()
    world.close()
    assert not torch.distributed.is_initialized()


def test_workers_without_a_meeting_place_are_told():
    identity = Identity(rank=0, size=2, local_rank=0, local_size=2, master_address="192.0.2.1")
    with pytest.raises(InputError, match="MASTER_PORT"):
        connect(identity, device="cpu")
