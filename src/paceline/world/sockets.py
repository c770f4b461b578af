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
from enum import Enum
from pathlib import Path
from typing import NamedTuple

_DESCRIPTORS = Path("/proc/self/fd")


class Sockets:
    """Sockets that gloo opened while a group was made; each with its inode, because numbers are used again."""

    def __init__(self) -> None:
        self._held: dict[int, int] = {}

    @contextlib.contextmanager
    def opened_here(self) -> Iterator[None]:
        """Take note of the sockets that gloo opens inside the block.

        Other libraries may open some at the same moment, on other threads, and keep them. Gloo's are those that one epoll
        instance watches which is new too, together with the socket that gloo listens on.
        """
        before = _descriptors()
        yield
        opened = {number: one for number, one in _descriptors().items() if before.get(number) != one}
        for number, one in opened.items():
            if one.kind is not _Kind.EPOLL:
                continue
            watched = [
                there for there in _watched(number) if there in opened and opened[there].kind is _Kind.SOCKET
            ]
            if any(_listens(there) for there in watched):
                self._held |= {there: opened[there].inode for there in watched}

    def shut(self) -> None:
        """End every wait on them, here and at the other end."""
        now = _descriptors()
        for number, inode in self._held.items():
            if number in now and now[number].inode == inode:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as held:
                    held.getpeername()  # raises for one that listens: gloo aborts the process when that one fails
                    held.shutdown(socket.SHUT_RDWR)


class _Kind(Enum):
    SOCKET, EPOLL, OTHER = range(3)


class _Descriptor(NamedTuple):
    kind: _Kind
    inode: int


def _descriptors() -> dict[int, _Descriptor]:
    found: dict[int, _Descriptor] = {}
    if not _DESCRIPTORS.exists():
        return found
    for name in os.listdir(_DESCRIPTORS):  # noqa: PTH208  (names only, in a folder that changes while it is read)
        with contextlib.suppress(OSError):
            target = (_DESCRIPTORS / name).readlink().name
            kind = _Kind.EPOLL if "[eventpoll]" in target else _Kind.OTHER
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                kind = _Kind.SOCKET
            found[int(name)] = _Descriptor(kind, status.st_ino)
    return found


def _watched(epoll: int) -> list[int]:
    """Return the descriptors that an epoll instance watches."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/self/fdinfo/{epoll}").read_text(encoding="ascii").splitlines()
        return [int(line.split()[1]) for line in lines if line.startswith("tfd:")]
    return []


def _listens(number: int) -> bool:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as held:
        return bool(held.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    return False
