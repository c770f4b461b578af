"""Whether machines reach each other: a port on each that takes connections, and attempts to open some. No torch."""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.launch.accepting import Acceptor
from paceline.world import interfaces
from paceline.world.interfaces import family

ATTEMPT_S = 5.0
"""How long a connection may take to open."""
_WAITING = (0, 115)
"""What `connect` says of a connection that is open, or on its way (EINPROGRESS)."""


@dataclass(frozen=True)
class Target:
    """Where a machine is to be reached."""

    name: str
    address: str
    port: int


class ReachablePort:
    """Takes connections and closes them: whoever opens one has reached this machine."""

    def __init__(self, address: str, selector: selectors.BaseSelector) -> None:
        """Listen on a free port, served by the loop that owns the selector."""
        self._selector = selector
        self._acceptor = Acceptor(socket.create_server((address, 0), family=family(address), backlog=1024))
        self.address, self.port = address, int(self._acceptor.socket.getsockname()[1])
        selector.register(self._acceptor.socket, selectors.EVENT_READ, self._take)

    def _take(self) -> None:
        connection = self._acceptor.accept()
        if connection is not None:
            connection.close()

    def close(self) -> None:
        """Stop listening."""
        self._selector.unregister(self._acceptor.socket)
        self._acceptor.close()


class ConnectionAttempts:
    """Connections that are being opened to several machines at once."""

    def __init__(self, targets: Sequence[Target], selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._deadline = time.monotonic() + ATTEMPT_S
        self._pending: dict[socket.socket, Target] = {}
        self._failed: dict[str, str] = {}
        for target in targets:
            self._open(target)

    def _open(self, target: Target) -> None:
        try:
            where = socket.getaddrinfo(
                target.address, target.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
            )[0][4]
            opening = socket.socket(family(target.address), socket.SOCK_STREAM)
        except OSError as error:
            self._failed[target.name] = error.strerror or str(error)
            return
        opening.setblocking(False)
        code = opening.connect_ex(where)
        if code not in _WAITING:
            opening.close()
            self._failed[target.name] = os.strerror(code)
            return
        self._pending[opening] = target
        self._selector.register(opening, selectors.EVENT_WRITE, lambda: self._on_writable(opening))

    def _on_writable(self, opening: socket.socket) -> None:
        code = opening.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        self._end(opening, os.strerror(code) if code else None)

    def _end(self, opening: socket.socket, reason: str | None) -> None:
        target = self._pending.pop(opening)
        self._selector.unregister(opening)
        opening.close()
        if reason is not None:
            self._failed[target.name] = reason

    def failed(self, now: float) -> Mapping[str, str] | None:
        """Return which machines were not reached, and why; None as long as that is open."""
        if self._pending and now < self._deadline:
            return None
        self._give_up()
        return self._failed

    def _give_up(self) -> None:
        for opening in list(self._pending):
            self._end(opening, f"no answer within {ATTEMPT_S:g} s")

    def close(self) -> None:
        """Let go of every descriptor."""
        self._give_up()


def exchange_address(address: str, interface: str | None) -> str:
    """Return where the workers of this machine are reached: an address of the interface that they use, if that is another one."""
    theirs = [one for one, name in interfaces.local_addresses().items() if name == interface]
    return address if address in theirs or not theirs else theirs[0]
