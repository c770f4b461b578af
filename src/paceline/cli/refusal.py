"""Reports why a command is refused: once for ranks of one machine that start together and are refused alike. Imports no torch.

Ranks that are refused have joined nothing they could agree through. So the first one takes a name that follows from its parent
(torchrun's agent, a proxy of MPI's, SLURM's step) and from the words, among Linux's abstract sockets, which go with it; it
speaks, and keeps the name until the others have come. They find it taken, and all end together, the others without a word.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import struct
import sys
import time

from paceline.errors import InputError, in_one_line
from paceline.world import env

_SPOKEN = b"."
LATE_S = 3.0
"""How much later than the first the others may come; whoever comes later still speaks, too."""


def refuse(text: str) -> None:
    """Print why this process ends, unless another rank of this machine does."""
    with contextlib.ExitStack() as undone:
        others = _others()
        taken = undone.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) if others else None
        name = _name(text)
        if taken is not None and not _take(taken, name):
            if _has_spoken(name):
                return
            taken = None
        print(in_one_line(text), file=sys.stderr, flush=True)  # noqa: T201
        if taken is not None:
            _wait(taken, others)


def _others() -> int:
    """Return how many other ranks were started on this machine; 0 where that is not known."""
    if not sys.platform.startswith("linux"):
        return 0
    try:
        identity, by_mpi, by_slurm = env.identity(), env.mpi_rank(), env.slurm_task()
    except InputError:
        return 0
    if identity is not None:
        return identity.local_size - 1
    if by_mpi is not None:
        return (by_mpi.local_size or by_mpi.size) - 1
    return by_slurm.size - 1 if by_slurm is not None else 0


def _name(text: str) -> bytes:
    told = f"{os.getuid()} {os.getppid()} {text}".encode(errors="surrogateescape")
    return b"\0paceline-" + hashlib.sha256(told).hexdigest().encode()


def _take(one: socket.socket, name: bytes) -> bool:
    try:
        one.bind(name)
    except OSError:
        return False
    one.listen(socket.SOMAXCONN)
    return True


def _has_spoken(name: bytes) -> bool:
    """Wait until the process that holds the name has spoken and all have come; return whether it has, and is this user's.

    Launchers end all ranks with the first, by a signal that would be the exit status: so all end together.
    """
    until = time.monotonic() + LATE_S
    while time.monotonic() < until:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            asking.settimeout(LATE_S)
            try:
                asking.connect(name)
            except ConnectionRefusedError:  # it has yet to listen, or has just ended
                time.sleep(0.01)
                continue
            except OSError:
                return False
            try:
                _, user, _ = struct.unpack("3i", asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
                if user != os.getuid() or asking.recv(1) != _SPOKEN:
                    return False
                asking.recv(1)
            except OSError:
                return False
            return True
    return False


def _wait(taken: socket.socket, others: int) -> None:
    """Wait for the others, and let all go together."""
    until = time.monotonic() + LATE_S
    with contextlib.ExitStack() as held, contextlib.suppress(OSError):
        for _ in range(others):
            taken.settimeout(max(0.001, until - time.monotonic()))
            held.enter_context(taken.accept()[0]).sendall(_SPOKEN)
