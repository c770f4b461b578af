"""Waiting on a word of shared memory without burning a core: Linux's futex, through the C library.

A waiter sleeps in the kernel until somebody wakes the word or the time is up; ctypes lets go of the
interpreter's lock meanwhile.
"""

from __future__ import annotations

import ctypes
import platform

_NUMBERS = {"x86_64": 202, "aarch64": 98}
_WAIT, _WAKE, _EVERYONE = 0, 1, 0x7FFFFFFF


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_syscall = ctypes.CDLL(None, use_errno=True).syscall
_number = _NUMBERS.get(platform.machine())


def available() -> bool:
    """Say whether this machine is one whose futex and memory order we know.

    Flags are plain stores that others read after the data they announce: that order is x86's own. Other processors
    would need fences that Python cannot issue.
    """
    return platform.system() == "Linux" and platform.machine() == "x86_64"


def wait(address: int, expected: int, seconds: float) -> None:
    """Sleep until the word at `address` is woken, unless it is not `expected` any more; at most `seconds`."""
    limit = _Time(int(seconds), int(seconds % 1 * 1e9))
    _syscall(
        _number, ctypes.c_void_p(address), _WAIT, ctypes.c_uint32(expected), ctypes.byref(limit), None, 0
    )


def wake(address: int) -> None:
    """Wake everyone who sleeps on the word at `address`."""
    _syscall(_number, ctypes.c_void_p(address), _WAKE, _EVERYONE, None, None, 0)
