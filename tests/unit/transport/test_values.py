"""Tensors and arrays as frames: they come out as they went in, large or small, and a message cannot name memory twice."""

import numpy as np
import pytest
import torch

from paceline.errors import CallRefusedError
from paceline.remote.vocabulary import Registered
from paceline.transport.incoming import Received
from paceline.transport.values import Reader, Writer

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.bool,
]


def sent(value):
    """Return a value as the other side reads it."""
    writer = Writer(Registered(), "other")
    head = writer.head(value)
    frames = [Received(np.frombuffer(bytearray(one), np.uint8)) for one in writer.frames]
    return Reader(Registered(), memoryview(head), frames).value()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (3, 5), (60, 100)], ids=str)
def test_tensors_of_every_kind_come_out_as_they_went_in(dtype, shape):
    given = (torch.rand(shape) * 9).to(dtype)
    turned = given.movedim(0, -1) if given.dim() else given
    for value in (given, turned, turned[..., ::2] if given.dim() else given, given.conj()):
        found = sent([value])[0]
        assert (found.dtype, found.shape) == (value.dtype, value.shape)
        assert torch.equal(found, value)
        found.zero_()  # it may be written to


def test_arrays_and_bytes_of_any_size_may_be_written_to():
    for size in (10, 100_000):
        found = sent([np.arange(size), bytearray(b"x" * size), b"y" * size])
        assert found[0].tolist() == list(range(size))
        found[0][:] = 0
        assert (found[1], found[2]) == (bytearray(b"x" * size), b"y" * size)
        found[1].extend(b"more")


def test_a_message_cannot_have_two_tensors_in_one_memory():
    writer = Writer(Registered(), "other")
    head = writer.head([torch.ones(2000), torch.ones(2000)])
    frames = [Received(np.frombuffer(bytearray(one), np.uint8)) for one in writer.frames]
    forged = head.replace(b"[2000],1,0]", b"[2000],0,0]")
    assert forged != head
    with pytest.raises(CallRefusedError, match="named twice"):
        Reader(Registered(), memoryview(forged), frames).value()
