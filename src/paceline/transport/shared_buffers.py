"""Large buffers between processes of one machine: memory that the sender owns and the receiver sees, so that each is copied once.

An arena is a file without a name (memfd): it takes no place in a file system, and is gone with the last process that has it.
A part of it belongs to one message to one receiver, which may write to it, and is used again only when that receiver has
let go of it or is dead. Each part has a byte at the arena's beginning: the sender sets it, the receiver clears it.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import select
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.compat.futex import barrier

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
UNIT = 64 << 10
"""Parts are multiples of this; smaller buffers go through the socket."""
SIZE = 512 << 20
_UNITS = SIZE // UNIT
_ROOMY = SIZE * 3 // 4
"""Where more is in use than this, receivers are asked to copy what they get, so that what they keep does not fill it."""


class Holder:
    """A process that is given parts, and how to know that it is dead."""

    def __init__(self, pid: int) -> None:
        self._descriptor = -1
        with contextlib.suppress(OSError):  # of another process namespace: it gives parts back, or keeps them
            self._descriptor = os.pidfd_open(pid) if pid > 0 else -1

    def is_dead(self) -> bool:
        """Return whether it sees no memory any more."""
        return self._descriptor >= 0 and bool(select.select([self._descriptor], [], [], 0)[0])

    def close(self) -> None:
        """Stop to look."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


@dataclass(frozen=True)
class BufferPlace:
    """Where a buffer is."""

    offset: int
    size: int
    copies: bool
    """Whether the receiver is asked to copy it."""


class Arena:
    """What a sender writes large buffers into."""

    def __init__(self, size: int = SIZE) -> None:
        self.descriptor = os.memfd_create("paceline-calls", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, size)
            # Nobody can shorten it, which would end whoever reads it.
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self._memory = mmap.mmap(self.descriptor, size)
        except OSError:
            os.close(self.descriptor)
            raise
        self._bytes: Bytes = np.frombuffer(self._memory, np.uint8)
        units = size // UNIT
        self._flags = memoryview(self._memory)[:units]
        self._used = bytearray(units)
        self._used[: -(-units // UNIT)] = b"\1" * -(-units // UNIT)  # the flags themselves
        self._given: dict[int, tuple[int, Holder]] = {}
        self._backed = 0
        """So many units have memory behind them."""
        self._roomy = units * _ROOMY // SIZE
        self._lock = threading.Lock()

    def put(self, content: memoryview, holder: Holder) -> BufferPlace | None:
        """Copy a buffer into a part for one receiver; None where there is no room."""
        size = len(content)
        count = -(-size // UNIT)
        with self._lock:
            self._collect()
            first = self._used.find(bytes(count))
            if first < 0 or not self._back(first + count):
                return None
            self._used[first : first + count] = b"\1" * count
            self._given[first] = count, holder
            self._flags[first] = 1
            copies = self._used.count(1) > self._roomy
        barrier()
        offset = first * UNIT
        # By numpy, which lets other threads run meanwhile.
        np.copyto(self._bytes[offset : offset + size], np.frombuffer(content, np.uint8))
        return BufferPlace(offset, size, copies)

    def _back(self, units: int) -> bool:
        """Have memory behind the first units, and return whether there is: writing where there is none ends the process."""
        if self.descriptor < 0:
            return False
        if units > self._backed:
            try:
                os.posix_fallocate(self.descriptor, self._backed * UNIT, (units - self._backed) * UNIT)
            except OSError:
                return False
            self._backed = units
        return True

    def duplicate(self) -> int:
        """Return a descriptor of it for the caller to close; raise OSError where it is closed."""
        with self._lock:
            return os.dup(self.descriptor)

    def take_back(self, part: BufferPlace) -> None:
        """Free a part that was never sent."""
        self._flags[part.offset // UNIT] = 0

    def in_use(self) -> int:
        """Return how many bytes receivers have, those that hold none of them any more left out."""
        with self._lock:
            self._collect()
            return UNIT * sum(count for count, _ in self._given.values())

    def close(self) -> None:
        """Release memory that nobody looks at; what receivers still hold stays until they let go."""
        with self._lock:
            self._collect()
            page = 0
            for first, (count, _) in sorted(self._given.items()):
                self._drop(page, first)
                page = first + count
            self._drop(page, len(self._used))
            os.close(self.descriptor)
            self.descriptor = -1

    def _drop(self, begin: int, end: int) -> None:
        begin = max(begin, -(-len(self._used) // UNIT))
        if begin < end:
            with contextlib.suppress(OSError):
                self._memory.madvise(mmap.MADV_REMOVE, begin * UNIT, (end - begin) * UNIT)

    def _collect(self) -> None:
        """Note which parts have come free."""
        flags = self._flags
        dead: dict[Holder, bool] = {}
        for first, (count, holder) in list(self._given.items()):
            if flags[first]:
                if holder not in dead:
                    dead[holder] = holder.is_dead()
                if not dead[holder]:
                    continue
            del self._given[first]
            self._used[first : first + count] = bytes(count)


class SharedView:
    """The arena of another process, as a receiver sees it."""

    def __init__(self, descriptor: int) -> None:
        memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        self._memory = memoryview(memory)
        self._flags = self._memory[: len(memory) // UNIT]

    def part(self, offset: int, size: int) -> Bytes:
        """Return the memory of a part; it is given back when nothing refers to it any more."""
        end = offset + size
        if offset % UNIT or offset < len(self._flags) or size <= 0 or end > len(self._memory):
            raise ValueError("it names memory that is not there")
        # No slice of an array: numpy has views of one refer to the array that it is a slice of, and not to it.
        found: Bytes = np.frombuffer(self._memory[offset:end], np.uint8)
        hold = _Hold(found, _give_back)
        hold.flags, hold.first = self._flags, offset // UNIT
        _held[id(hold)] = hold
        return found


class _Hold(weakref.ref[Bytes]):
    """What this process has of another's arena."""

    __slots__ = ("first", "flags")
    flags: memoryview
    first: int


_held: dict[int, _Hold] = {}


def _give_back(hold: weakref.ref[Bytes]) -> None:
    if isinstance(hold, _Hold) and _held.pop(id(hold), None) is not None:
        barrier()  # what was read here was read before the sender may write again
        hold.flags[hold.first] = 0


# A forked process sees what its parent holds, for as long as it likes and without a word to the sender: all of that is kept
# for good, in both. The sender has its bound, and sends through the socket when that is reached.
os.register_at_fork(before=_held.clear, after_in_child=_held.clear)
