"""The sockets of a process group, so that whoever waits on them can be made to stop.

Gloo has no way to end a wait whose peer is silent: its `abort` returns and the wait goes on to the time-out. A socket
that is shut down ends it at once, with the same error that a peer's death gives.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

_DESCRIPTORS = Path("/proc/self/fd")


class Sockets:
    """Descriptors that were opened while a group was made; each with its inode, because numbers are used again."""

    def __init__(self) -> None:
        self._held: dict[int, int] = {}

    @contextlib.contextmanager
    def opened_here(self) -> Iterator[None]:
        """Take note of every socket that is opened inside the block."""
        before = _sockets()
        yield
        self._held |= {number: inode for number, inode in _sockets().items() if before.get(number) != inode}

    def shut(self) -> None:
        """End every wait on them, here and at the other end."""
        now = _sockets()
        for number, inode in self._held.items():
            if now.get(number) == inode:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as held:
                    held.getpeername()  # raises for one that listens: gloo aborts the process when that one fails
                    held.shutdown(socket.SHUT_RDWR)


def _sockets() -> dict[int, int]:
    found: dict[int, int] = {}
    if not _DESCRIPTORS.exists():
        return found
    for name in os.listdir(_DESCRIPTORS):  # noqa: PTH208  (names only, in a folder that changes while it is read)
        with contextlib.suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[int(name)] = status.st_ino
    return found
