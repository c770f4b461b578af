"""The order in which another process sees what was stored: no half of a message behind a flag that is up.

A processor that keeps the order by itself passes without any barrier, and one that does not may pass by luck: the argument
stands in `world/futex.py`. What these tests rule out is a barrier in the wrong place, and on aarch64 now and then a missing one.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import subprocess
import sys
import time

import pytest

from paceline.compat import futex
from paceline.world.status_page import OperationKind, StatusPage, StatusPageReader
from tests.patience import HANG_S

ROUNDS, WORDS = 5_000, 64
SIZE = 1 << 14
PARTNER = """
import ctypes, mmap, os, sys
from paceline.compat import futex

fd, rounds, words, barrier = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), getattr(futex, sys.argv[4])
memory = mmap.mmap(fd, 1 << 14)
view = memoryview(memory).cast("Q")
data, flag, answer = 8, 1024, 1032
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
torn = 0
for number in range(1, rounds + 1):
    while (seen := view[flag]) < number:
        futex.wait(address + 8 * flag, seen & futex.LOW, 0.02)
    barrier()
    torn += any(view[data + place] != number for place in range(words))
    barrier()
    view[answer] = number
    futex.wake(address + 8 * answer)
print(torn)
"""


def test_this_machine_is_one_we_know() -> None:
    known = platform.system() == "Linux" and platform.machine() in ("x86_64", "aarch64")
    assert futex.available() == known
    assert (futex.barrier is futex.full_barrier) == (platform.machine() != "x86_64")
    for _ in range(1000):
        futex.full_barrier()  # raises where the kernel does not get as far as its barrier


@pytest.mark.parametrize("barrier", ["barrier", "full_barrier"])
def test_messages_behind_a_flag_arrive_whole(barrier: str) -> None:
    descriptor = os.memfd_create("litmus")
    os.ftruncate(descriptor, SIZE)
    memory = mmap.mmap(descriptor, SIZE)
    view = memoryview(memory).cast("Q")
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    flag, answer = 1024, 1032
    fence = getattr(futex, barrier)
    command = [sys.executable, "-c", PARTNER, str(descriptor), str(ROUNDS), str(WORDS), barrier]
    partner = subprocess.Popen(command, pass_fds=[descriptor], stdout=subprocess.PIPE, text=True)
    try:
        for number in range(1, ROUNDS + 1):
            for place in range(8, 8 + WORDS):
                view[place] = number
            fence()
            view[flag] = number
            futex.wake(address + 8 * flag)
            while (seen := view[answer]) < number:
                futex.wait(address + 8 * answer, seen & futex.LOW, 0.02)
                assert partner.poll() is None
            fence()
        told, _ = partner.communicate(timeout=HANG_S)
    finally:
        partner.kill()
        partner.wait()
        os.close(descriptor)
    assert told.strip() == "0"


WRITER = """
import sys, time
from paceline.world.status_page import OperationKind, Phase, StatusPage
status_page = StatusPage(int(sys.argv[1]))
number = 0
while True:
    number += 1
    status_page.begin(OperationKind.STEP if number % 2 else OperationKind.SAVE, number)
    status_page._kind = OperationKind.STEP
    time.sleep(number % 7 * 1e-4)  # a reader needs a moment in which nothing is stored
    status_page.end()
"""


def test_a_status_page_is_read_in_one_piece() -> None:
    """The words inside the sequence lock belong together: steps counts the operations, one behind at most."""
    page = StatusPage.create()
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(page)], pass_fds=[page])
    reader = StatusPageReader(page)
    try:
        deadline = time.monotonic() + HANG_S
        while reader.read().operation < 100:
            assert time.monotonic() < deadline
        whole = 0
        while whole < 3000:
            seen = reader.read()
            if not seen.whole:  # it has lost its core in the middle
                assert time.monotonic() < deadline
                continue
            whole += 1
            assert seen.step == seen.operation
            assert seen.steps in (seen.operation, seen.operation - 1)
            if seen.kind is not OperationKind.OTHER:
                assert (seen.kind is OperationKind.STEP) == (seen.operation % 2 == 1)
            assert seen.silence_s(time.monotonic()) < 30, "the moment belongs to another phase"
    finally:
        writer.kill()
        writer.wait()
        reader.close()
        os.close(page)
