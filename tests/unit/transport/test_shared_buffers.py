"""Memory that a sender and a receiver share: a part is never written to again while somebody may look at it."""

import errno
import gc
import os
import signal
import threading

import numpy as np
import pytest
import torch

from paceline.transport.mailbox import Mailbox
from paceline.transport.outgoing import PeerAddress
from paceline.transport.shared_buffers import UNIT, Arena, Holder, SharedView
from tests.patience import HANG_S

SIZE = 16 * UNIT


@pytest.fixture
def arena():
    made = Arena(SIZE)
    yield made
    made.close()


@pytest.fixture
def me():
    made = Holder(os.getpid())
    yield made
    made.close()


def content(number, size=3 * UNIT):
    return memoryview(bytes([number]) * size)


def seen(view, part):
    return view.part(part.offset, part.size)


def test_a_part_is_used_again_only_when_nobody_looks_at_it_any_more(arena, me):
    view = SharedView(arena.descriptor)
    kept = torch.frombuffer(seen(view, arena.put(content(1), me)), dtype=torch.uint8)
    part_of_it = kept.view(3, UNIT)[1]
    del kept
    for number in range(2, 40):
        found = seen(view, arena.put(content(number), me))
        assert set(found[::1000]) == {number}
        found[:] = 0  # whoever got it may write to it
        del found
        assert arena.in_use() == 3 * UNIT
        assert part_of_it.unique().tolist() == [1]
    del part_of_it
    assert arena.in_use() == 0


@pytest.mark.parametrize(
    "look", [lambda one: one[5:50], lambda one: one.view(np.float32), lambda one: one.reshape(3, UNIT)]
)
def test_an_array_that_is_a_view_of_a_part_keeps_it(arena, me, look):
    view = SharedView(arena.descriptor)
    kept = look(seen(view, arena.put(content(1), me)))
    gc.collect()
    assert arena.in_use() == 3 * UNIT
    del kept
    assert arena.in_use() == 0


def test_it_is_bounded_and_asks_for_copies_before_it_is_full(arena, me):
    parts = []
    while (part := arena.put(content(1, UNIT), me)) is not None:
        parts.append(part)
    assert len(parts) == 15  # one unit says which others are in use
    assert [one.copies for one in parts] == [False] * 11 + [True] * 4
    assert len({one.offset for one in parts}) == 15
    arena.take_back(parts[7])
    assert arena.put(content(2, UNIT), me).offset == parts[7].offset
    assert arena.put(content(2, UNIT), me) is None


def test_parts_of_a_receiver_that_died_come_free_and_those_of_one_that_lives_do_not(arena, me):
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    other = Holder(pid)
    arena.put(content(1), me)
    arena.put(content(2), other)
    assert arena.in_use() == 6 * UNIT
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert arena.in_use() == 3 * UNIT
    other.close()


def test_a_forked_process_keeps_what_its_parent_held(arena, me):
    view = SharedView(arena.descriptor)
    found = seen(view, arena.put(content(1), me))
    go, done = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(go[0], 1)
        same = set(found[::1000]) == {1}
        del found
        gc.collect()
        os.write(done[1], b"+" if same else b"-")
        os._exit(0)
    del found
    for number in range(2, 10):
        del number
        arena.put(content(9), me)
    os.write(go[1], b"x")
    assert os.read(done[0], 1) == b"+"
    os.waitpid(pid, 0)
    again = [arena.put(content(9, UNIT), me) for _ in range(20)]
    assert UNIT not in [one.offset for one in again if one is not None]
    for one in (*go, *done):
        os.close(one)


def test_nobody_can_shorten_it_or_name_memory_outside_of_it(arena, me):
    view = SharedView(arena.descriptor)
    for size in (0, SIZE // 2, 2 * SIZE):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.descriptor, size)
    for offset, size in ((0, 10), (UNIT + 1, 10), (UNIT, SIZE), (SIZE, 1), (UNIT, 0), (-UNIT, UNIT)):
        with pytest.raises(ValueError, match="not there"):
            view.part(offset, size)


def test_what_a_receiver_keeps_outlives_both_mailboxes_and_is_never_written_to(monkeypatch):
    """More than there is room for: the rest is copied by the receiver, or goes through the socket."""
    monkeypatch.setattr("paceline.transport.mailbox.Arena", lambda: Arena(SIZE))
    boxes = [Mailbox(b"secret"), Mailbox(b"secret")]
    entries = [PeerAddress(box.boot, box.bind(None, None)[0]) for box in boxes]
    kept, arrived = [], threading.Semaphore(0)

    def take(_sender, _content, frames):
        kept.extend(one.take() for one in frames)
        arrived.release()

    boxes[0].start({"other": entries[1]}, lambda *_: None, lambda _: None)
    boxes[1].start({"one": entries[0]}, take, lambda _: None)
    memory = bytearray(UNIT + 100)
    for number in range(30):
        memory[:] = bytes([number]) * len(memory)
        assert boxes[0].send("other", b"", [memoryview(memory), memoryview(memory)[:5000]])
        if number == 0:  # the first go through the socket until the other side has the memory
            assert arrived.acquire(timeout=HANG_S)
            assert boxes[0]._arena is not None
    for _ in range(29):
        assert arrived.acquire(timeout=HANG_S)
    assert boxes[0]._arena.in_use() > 0
    for box in boxes:
        box.close()
    assert [(one.min(), one.max()) for one in kept] == [(n // 2, n // 2) for n in range(60)]
    assert all(one.flags.writeable and len(one) in (UNIT + 100, 5000) for one in kept)
    assert all(not np.shares_memory(a, b) for a in kept[:20:2] for b in kept[20::2])


def test_where_there_is_no_memory_behind_it_a_buffer_goes_another_way(arena, me, monkeypatch):
    def none_left(*_):
        raise OSError(errno.ENOSPC, "no space left")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", none_left)
        assert arena.put(content(1), me) is None
        assert arena.in_use() == 0
    part = arena.put(content(1), me)
    assert os.fstat(arena.descriptor).st_blocks * 512 >= part.offset + part.size
    arena.take_back(part)
    monkeypatch.setattr(os, "posix_fallocate", none_left)
    assert arena.put(content(2), me) == part  # it has been asked for once


def test_a_closed_one_is_given_to_nobody(me):
    closed = Arena(SIZE)
    closed.close()
    with pytest.raises(OSError, match="Bad file"):
        closed.duplicate()
    assert closed.put(content(1), me) is None
