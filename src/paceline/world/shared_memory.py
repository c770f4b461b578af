"""The shared-memory channel: memory that all workers of one host share, and flags in it that say who is how far.

The memory is an anonymous file (memfd): it has no name anywhere, so nothing is left behind after any crash. A wait
ends at once when its flag is up, spins briefly where there are cores to spare, then sleeps in the kernel, and
looks every few milliseconds whether the peers are still alive.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import time
import weakref
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.compat import futex
from paceline.errors import InputError
from paceline.world import env, spans
from paceline.world.interruption import LOOK_S
from paceline.world.objects import all_gather_object
from paceline.world.world import World

SIZE = 1 << 36
"""Address space of a channel; pages take memory only once they are written."""
LINE = 64
"""A flag has a cache line to itself."""
HEADER = 1 << 17
FLAGS = 4
"""Flags of each worker: 500 of them fit into the header."""
SPIN_S = 100e-6
CHECK_S = 0.02
"""How long a sleeper goes without looking at its peers."""
_WORD = 8
"""Bytes of a flag: it counts exchanges, and at a million a second would come round after half a million years."""
_BROKEN = (HEADER - LINE) // _WORD
"""The word that says that nobody may wait here any more."""
_LEFT = 1
"""How many words after a worker's first flag, in the same cache line, lies the one that says that it has left."""
_NAME = "paceline-channel"
_MAP_NORESERVE = 0x4000


class PeerLostError(RuntimeError):
    """A worker on the same host ended in the middle of an exchange."""


class SharedMemoryChannel:
    """Shared memory of the workers of one host, with flags that count up."""

    def __init__(
        self,
        memory: mmap.mmap,
        rank: int,
        peers: list[int],
        timeout_s: float,
        absent: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`absent` raises where a peer that is waited for has left the loop that this worker is in."""
        self.rank = rank
        self.size = len(peers)
        self._memory = memory
        self._flags = memoryview(memory)[:HEADER].cast("Q")
        self._words = [
            [(flag * self.size + rank) * (LINE // _WORD) for rank in range(self.size)]
            for flag in range(FLAGS)
        ]
        """The word of each flag of each worker."""
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._pids = peers
        self._poll = select.poll()
        self._watched = {os.pidfd_open(pid): other for other, pid in enumerate(peers) if other != rank}
        for descriptor in self._watched:
            self._poll.register(descriptor, select.POLLIN)
            weakref.finalize(self, os.close, descriptor)
        # With more workers than cores, whoever spins keeps the one it waits for from running.
        self._spin_s = SPIN_S if self.size <= env.cores() else 0.0
        self._timeout_s = timeout_s
        self._absent, self._looked = absent, 0.0
        self._fences = futex.barrier is futex.full_barrier
        self._next = HEADER

    def reserve(self, length: int) -> int:
        """Set aside bytes; every worker asks for the same ones in the same order, so all get the same place."""
        place = self._next
        self._next += -(-length // LINE) * LINE
        if self._next > SIZE:
            raise MemoryError("the shared-memory channel is full")
        return place

    def tensor(self, place: int, count: int, dtype: torch.dtype) -> Tensor:
        """Return a piece of the shared memory as a flat tensor."""
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=place)

    def post(self, flag: int, value: int) -> None:
        """Raise this worker's flag to `value` and wake who waits for it: what it stored and loaded before is done with."""
        word = self._words[flag][self.rank]
        if self._fences:
            futex.barrier()
        self._flags[word] = value
        futex.wake(self._address + _WORD * word)

    def wait(self, flag: int, value: int) -> None:
        """Wait until everybody else's flag has reached `value`: what they stored before is here to be loaded."""
        for other, word in enumerate(self._words[flag]):
            if other != self.rank and self._flags[word] < value:
                with spans.of[spans.WAITING]:
                    self._wait_word(word, value, other)
        if self._fences:
            futex.barrier()

    def meets(self, flag: int, value: int, instead: int, seen: int) -> bool:
        """Wait like `wait`; return False where somebody raises the flag `instead` beyond `seen` without having reached it."""
        for other, word in enumerate(self._words[flag]):
            started = time.perf_counter()
            while other != self.rank and self._flags[word] < value:
                gone_on = self._flags[self._words[instead][other]] > seen
                if self._fences:
                    futex.barrier()
                if gone_on and self._flags[word] < value:  # it raises both in the order in which it comes by
                    return False
                self._nap(word, value, other, started)
        return True

    def raised(self, flag: int) -> list[int]:
        """Return where everybody's flag stands."""
        return [self._flags[word] for word in self._words[flag]]

    def abandon(self) -> None:
        """End the waits of everybody on this channel, at the latest when they next look at their peers."""
        self._flags[_BROKEN] = 1
        for word in chain(*self._words):
            futex.wake(self._address + _WORD * word)

    def leave(self) -> None:
        """End the waits for this worker: what it has posted counts, and nothing more will come."""
        word = self._words[0][self.rank]
        if self._fences:
            futex.barrier()
        self._flags[word + _LEFT] = 1
        for one in self._words:
            futex.wake(self._address + _WORD * one[self.rank])

    def _wait_word(self, word: int, value: int, other: int) -> None:
        flags = self._flags
        started = time.perf_counter()
        while time.perf_counter() - started < self._spin_s:
            if flags[word] >= value:
                return
        while flags[word] < value:
            self._nap(word, value, other, started)

    def _nap(self, word: int, value: int, other: int, started: float) -> None:
        if (seen := self._flags[word]) < value:
            futex.wait(self._address + _WORD * word, seen & futex.LOW, CHECK_S)
        if self._flags[word] < value:
            self._check_left(word, value, other)
            self._check_peers(other, started)
            self._check_loop(word, value, other, started)

    def _check_left(self, word: int, value: int, other: int) -> None:
        if not self._flags[self._words[0][other] + _LEFT]:
            return
        if self._fences:
            futex.barrier()
        if self._flags[word] < value:  # it leaves after the last that it posts
            raise PeerLostError(f"connection closed by peer: rank {other} has left the group.")

    def _check_loop(self, word: int, value: int, other: int, started: float) -> None:
        now = time.perf_counter()
        if now - max(started, self._looked) < LOOK_S:
            return
        self._looked = now
        try:
            self._absent(other)
        except InputError:
            if self._flags[word] < value:  # it leaves after the last that it posts
                raise

    def _check_peers(self, other: int, started: float) -> None:
        if self._flags[_BROKEN]:
            raise PeerLostError("connection closed by peer: the channel was abandoned.")
        for descriptor, _ in self._poll.poll(0):
            lost = self._watched[descriptor]
            raise PeerLostError(f"connection closed by peer: rank {lost} (pid {self._pids[lost]}) has ended.")
        if time.perf_counter() - started > self._timeout_s:
            raise PeerLostError(
                f"timed out waiting for rank {other} (pid {self._pids[other]}) after {self._timeout_s:g} s in shared memory."
            )


def machine() -> tuple[str, str]:
    """Return what tells machines apart: the start of the kernel and, as a container has its own, processes and network."""
    spaces = [env.namespace("pid"), env.namespace("net")]
    if env.kernel() and all(spaces):
        return env.kernel(), " ".join(spaces)
    return env.host(), ""


def open_channel(world: World, timeout_s: float = 300.0) -> SharedMemoryChannel | None:
    """Open a channel among all workers, when they share one host and its kernel lets them; else give None.

    Every worker must call it: they agree on the outcome.
    """
    possible = world.device.type == "cpu" and futex.available()
    here = machine() if possible else None
    descriptor = -1
    if possible and world.is_first:
        descriptor = _create()
    try:
        offers = all_gather_object(world.comm, (here, os.getpid(), descriptor))
        memory: mmap.mmap | None = None
        if possible and {offer[0] for offer in offers} == {here}:
            memory = _map(offers[0][1], offers[0][2])
        # Everyone has mapped it (or has failed to) when this returns: the descriptor can go.
        everyone = all(all_gather_object(world.comm, memory is not None))
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    if memory is None or not everyone:
        return None
    ranks = dist.get_process_group_ranks(world.comm.group)

    def absent(other: int) -> None:
        if world.interruption.absent is not None:
            world.interruption.absent(ranks[other])

    channel = SharedMemoryChannel(memory, world.rank, [offer[1] for offer in offers], timeout_s, absent)
    world.interruption.on_raise(channel.abandon)
    world.closing.append(channel.leave)
    return channel


def _create() -> int:
    """Return the descriptor of a new memory; -1 where a limit stands against it, which all workers then hear of."""
    try:
        descriptor = os.memfd_create(_NAME)
    except OSError:
        return -1
    try:
        os.ftruncate(descriptor, SIZE)
    except OSError:  # a limit on the size of files
        os.close(descriptor)
        return -1
    return descriptor


def _map(pid: int, descriptor: int) -> mmap.mmap | None:
    path = Path(f"/proc/{pid}/fd/{descriptor}")
    try:
        if not str(path.readlink()).startswith(f"/memfd:{_NAME}"):
            return None
        own = os.open(path, os.O_RDWR)
        try:
            return mmap.mmap(own, SIZE, flags=mmap.MAP_SHARED | _MAP_NORESERVE)
        finally:
            os.close(own)
    except OSError:
        return None  # another container's process, or a limit on address space: sockets will do
