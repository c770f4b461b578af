"""A state that is cut anew, between real workers: the values, the bytes that go over the wire, and the memory it takes."""

import re
from pathlib import Path

import pytest
import torch

from paceline.state import redistribution
from paceline.state.chunks import ChunkBounds, TensorChunk, TensorMeta, rows_of, survey
from paceline.state.redistribution import Redistribution
from tests.workers import run_workers

ROWS, WIDTH, TENSORS = 1200, 4096, 4
"""Together 79 MB, of which a third is 26 MB."""
META = TensorMeta((ROWS, WIDTH), torch.float32)


def rows(workers, rank):
    """Return the rows of one of several workers; nothing for one that is not among them."""
    start, stop = (min(place, workers) * ROWS // workers for place in (rank, rank + 1))
    return ChunkBounds((start, 0), (stop - start, WIDTH))


def values(number, bounds):
    """Return what some rows of a tensor hold: other numbers in every place."""
    count = bounds.numel
    first = number * ROWS * WIDTH + bounds.offset[0] * WIDTH
    return torch.arange(first, first + count, dtype=torch.int32).view(torch.float32).view(bounds.shape)


class Counted:
    """A `Comm` that counts the bytes this worker sends to others; everything else is the real one's."""

    def __init__(self, comm):
        self._comm, self.sent, self.largest = comm, 0, 0

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def isend(self, tensor, to):
        self.sent += tensor.numel() * tensor.element_size()
        self.largest = max(self.largest, tensor.numel() * tensor.element_size())
        return self._comm.isend(tensor, to)


def peak():
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024


def recut(world, before, after, message):
    """Cut a state for `before` workers anew for `after`; return the bytes sent, and how much memory that took."""
    redistribution.MESSAGE = message
    held = {}
    for number in range(TENSORS):
        bounds = rows(before, world.rank)
        held[f"model/{number}"] = TensorChunk(values(number, bounds), bounds, META)
    found = survey(world, held)
    wanted = {key: rows(after, world.rank) for key in held}
    comm = Counted(world.comm)
    object.__setattr__(world, "comm", comm)
    world.comm.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the highest mark of its memory is forgotten
    start = peak()
    there = Redistribution(world, [held], found, wanted)
    took = peak() - start
    for number, (key, bounds) in enumerate(wanted.items()):
        got, right = there.read(key, bounds), values(number, bounds)
        assert torch.equal(got.view(torch.int32), right.view(torch.int32)), key
    return {
        "sent": comm.sent,
        "largest": comm.largest,
        "took": took,
        "moved": there.moved,
        "held": rows_of(held),
    }


def least(before, after):
    """Return the bytes that the two cuts imply: what each wants and has not."""
    lacks = 0
    for rank in range(max(before, after)):
        (first, _), (count, _) = rows(before, rank).offset, rows(before, rank).shape
        (start, _), (length, _) = rows(after, rank).offset, rows(after, rank).shape
        both = max(0, min(first + count, start + length) - max(first, start))
        lacks += length - both
    return lacks * WIDTH * 4 * TENSORS


@pytest.mark.parametrize(("before", "after"), [(4, 3), (3, 4), (1, 4)])
def test_only_what_a_worker_lacks_is_sent_to_it_in_messages_of_bounded_size(before, after):
    message = 1 << 20
    results = run_workers(recut, 4, before, after, message)
    wanted = least(before, after)
    assert sum(one["sent"] for one in results) == wanted
    assert {one["moved"] for one in results} == {wanted}
    assert max(one["largest"] for one in results) <= message
    # What it is sent stays with it; beside that there are a few messages, and never a second copy of anything it holds.
    whole = ROWS * WIDTH * 4 * TENSORS
    received = whole // after
    assert max(one["took"] for one in results) < received + 8 * message < whole / 2
