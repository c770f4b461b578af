"""Waiting on a word of shared memory without burning a core, and the order in which others see what was stored there.

Both are Linux's futex, through the C library. A waiter sleeps in the kernel until somebody wakes the word or the time is
up; ctypes releases the interpreter's lock meanwhile.

The memory model. Processes announce data by a flag: the one that publishes stores the data and then the flag, the one
that reads loads the flag and then the data. Between the two each needs a barrier, or the processor may swap them:

    publisher: data; barrier(); flag            reader: flag; barrier(); data

and the same where a reader announces that data may be overwritten: its loads, barrier(), its flag; the writer loads the
flag, barrier(), and stores. The flag itself is one aligned word that CPython stores and loads with one instruction.

x86-64 needs none: it only ever lets a load pass an earlier store to another place (Intel SDM volume 3, 9.2.2), and
neither side has a store followed by a load here. Large copies with non-temporal stores end with a fence of their own (glibc).

aarch64 may reorder any two accesses without a dependency. `barrier()` is a FUTEX_WAKE on a word of this process's own that
nobody waits on: before it looks whether anybody waits, the kernel executes a full barrier (`smp_mb()`, on aarch64 `dmb ish`)
in `futex_hb_waiters_pending`, "Full barrier (B)" of the ordering comment at the top of kernel/futex/waitwake.c. It stands
there so that the stores before any FUTEX_WAKE are ordered with the look at the waiters, and so is part of what futexes are.
`dmb ish` orders all loads and stores of this processor before it with all after it, for every processor that shares the
memory; entering and leaving the kernel orders nothing, and need not. A thread that moves to another processor in between
passes the scheduler, which orders its accesses. Threads that torch computes with were joined before and are started after.
The argument needs a call that gets that far: one waiter may be woken (not none), at an address that can be read.

What does not do: a lock taken and given back lets accesses from both sides in between and swap there; membarrier(2)
returns without a barrier in a process of one thread (expedited) or takes 8 ms (global); libatomic, which has
`atomic_thread_fence`, is not on every machine. The cost here is 2 us (ctypes and a system call), on aarch64 alone.
"""

from __future__ import annotations

import ctypes
import platform
import sys

_NUMBERS = {"x86_64": 202, "aarch64": 98}
_ORDERED = ("x86_64",)
"""Where stores are seen in the order they were made, and loads are made in the order of the program."""
_WAIT, _WAKE, _EVERYONE, _PRIVATE = 0, 1, 0x7FFFFFFF, 128
LOW = 0xFFFFFFFF
"""A futex is the low half of a flag of eight bytes, which comes first in memory on the machines we know."""


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_syscall = ctypes.CDLL(None, use_errno=True).syscall
_number = _NUMBERS.get(platform.machine())
_own = ctypes.c_uint32(0)
_own_address = ctypes.c_void_p(ctypes.addressof(_own))


def available() -> bool:
    """Return whether this machine is one whose futex and memory order we know."""
    return (
        platform.system() == "Linux"
        and _number is not None
        and sys.maxsize > 2**32
        and sys.byteorder == "little"
    )


def full_barrier() -> None:
    """Order all loads and stores before this call with all after it, on any machine."""
    if _syscall(_number, _own_address, _WAKE | _PRIVATE, 1, None, None, 0) != 0:
        raise OSError(ctypes.get_errno(), "the futex system call, which orders memory here, is not allowed")


def _no_barrier() -> None:
    """Do nothing: the processor keeps the order."""


barrier = _no_barrier if platform.machine() in _ORDERED else full_barrier
"""Order what was stored and loaded before with what comes after, as publishing through a flag needs it; see above."""


def wait(address: int, expected: int, seconds: float) -> None:
    """Sleep until the word at `address` is woken, unless it is not `expected` any more; at most `seconds`."""
    limit = _Time(int(seconds), int(seconds % 1 * 1e9))
    _syscall(
        _number, ctypes.c_void_p(address), _WAIT, ctypes.c_uint32(expected), ctypes.byref(limit), None, 0
    )


def wake(address: int) -> None:
    """Wake everyone who sleeps on the word at `address`."""
    _syscall(_number, ctypes.c_void_p(address), _WAKE, _EVERYONE, None, None, 0)
