"""Who may connect: each connection proves in a few seconds whose it is, or is dropped; one thread sees to all of them.

On one machine the folder of the socket is the lock. Between machines a number is given out that was never used before, and
what comes back must be made of it, of the secret and of both processes: what somebody has read on the wire opens nothing.
"""

from __future__ import annotations

import hmac
import os
import secrets
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.transport.sealing import BOOT_BYTES, derived
from paceline.transport.shared_buffers import SharedView

NONCE_BYTES, PROOF_BYTES, ANSWER_BYTES = 16, 32, 1
MAPPED, ADMITTED = b"+", b"-"
"""The answers: the arena that came along is seen; or the peer may speak, and sends everything through the connection."""
_PROVE_S = 3.0
"""How long a connection may take to prove itself."""
_MOST_GUESTS, _GRACE_S = 256, 0.5
"""So many connections from the network may be unproved at once; for one more, the oldest goes that has had this long."""
_BACKLOG = 1024
_PAUSE_S = 0.05


def hello(secret: bytes, nonce: bytes, sender: bytes, recipient: bytes) -> bytes:
    """Return the proof that a process knows the secret, for one connection."""
    return derived(secret, b"hello", nonce, sender, recipient)


@dataclass
class _Guest:
    """A connection that has not proved itself yet."""

    connection: socket.socket
    far: bool
    until: float
    nonce: bytes = b""
    heard: bytes = b""
    descriptors: list[int] = field(default_factory=list)

    def close(self) -> None:
        self.connection.close()
        for one in self.descriptors:
            os.close(one)


class Admission:
    """Listens, and hands on who has proved to be a peer."""

    def __init__(
        self,
        secret: bytes,
        boot: bytes,
        near: socket.socket | None,
        far: socket.socket | None,
        admit: Callable[[socket.socket, bytes, bool, SharedView | None], str | None],
        refuse: Callable[[str], None],
    ) -> None:
        """`admit` returns what is wrong with a peer; `refuse` hears of those who are turned away."""
        self._secret, self._boot, self._admit, self._refuse = secret, boot, admit, refuse
        self._listening = {one.fileno(): one for one in (near, far) if one is not None}
        self._far = far
        self._guests: dict[int, _Guest] = {}
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, daemon=True, name="paceline-admission")
        self._thread.start()

    def close(self) -> None:
        """Listen no more."""
        os.eventfd_write(self._stop, 1)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._stop, select.POLLIN)
        for descriptor, one in self._listening.items():
            one.setblocking(False)
            poll.register(descriptor, select.POLLIN)
        while True:
            until = min((one.until for one in self._guests.values()), default=None)
            left = None if until is None else 1000 * max(0.0, until - time.monotonic())
            ready = {descriptor for descriptor, _ in poll.poll(left)}
            if self._stop in ready:
                break
            for descriptor in ready & self._listening.keys():
                self._accept(poll, self._listening[descriptor])
            for descriptor in ready & self._guests.keys():
                try:
                    self._hear(poll, descriptor)
                except Exception:  # noqa: BLE001  (of one connection: the others depend on this thread)
                    traceback.print_exc(file=sys.stderr)
                    self._drop(poll, descriptor)
            now = time.monotonic()
            for descriptor in [one for one, guest in self._guests.items() if guest.until <= now]:
                self._drop(poll, descriptor)
        for guest in self._guests.values():
            guest.close()
        os.close(self._stop)

    def _accept(self, poll: select.poll, listening: socket.socket) -> None:
        if listening is self._far and not self._make_room(poll):
            # It waits where the operating system keeps it; those that are here go on meanwhile.
            time.sleep(_PAUSE_S)
            return
        try:
            connection, _ = listening.accept()
        except BlockingIOError:
            return
        except OSError:  # no more descriptors here: some come free when strangers' time is up
            time.sleep(_PAUSE_S)
            return
        connection.setblocking(False)
        guest = _Guest(connection, listening is self._far, time.monotonic() + _PROVE_S)
        self._guests[connection.fileno()] = guest
        poll.register(connection, select.POLLIN)
        if guest.far:
            keep_alive(connection)
            guest.nonce = secrets.token_bytes(NONCE_BYTES)
            try:
                connection.send(guest.nonce)
            except OSError:
                self._drop(poll, connection.fileno())

    def _make_room(self, poll: select.poll) -> bool:
        """Return whether one more may come from the network."""
        guests = [(descriptor, guest) for descriptor, guest in self._guests.items() if guest.far]
        if len(guests) < _MOST_GUESTS:
            return True
        descriptor, oldest = guests[0]
        if time.monotonic() < oldest.until - _PROVE_S + _GRACE_S:
            return False
        self._drop(poll, descriptor)
        return True

    def _hear(self, poll: select.poll, descriptor: int) -> None:
        guest = self._guests[descriptor]
        wanted = BOOT_BYTES + (PROOF_BYTES if guest.far else 0)
        try:
            if guest.far:
                part = guest.connection.recv(wanted - len(guest.heard))
            else:
                part, descriptors, _, _ = socket.recv_fds(guest.connection, wanted - len(guest.heard), 1)
                guest.descriptors += descriptors
        except BlockingIOError:
            return
        except OSError:
            part = b""
        guest.heard += part
        if not part:
            self._drop(poll, descriptor)
        elif len(guest.heard) == wanted:
            poll.unregister(descriptor)
            del self._guests[descriptor]
            wrong = self._judge(guest)
            if wrong is not None:
                self._refuse(wrong)
                guest.connection.close()

    def _drop(self, poll: select.poll, descriptor: int) -> None:
        guest = self._guests.pop(descriptor, None)
        if guest is not None:
            poll.unregister(descriptor)
            guest.close()

    def _judge(self, guest: _Guest) -> str | None:
        """Let a connection in, or return why not."""
        boot, proof = guest.heard[:BOOT_BYTES], guest.heard[BOOT_BYTES:]
        if guest.far and not hmac.compare_digest(proof, hello(self._secret, guest.nonce, boot, self._boot)):
            return "a connection did not prove to know it"
        view = None
        for descriptor in guest.descriptors[:1]:
            try:
                view = SharedView(descriptor)
            except (OSError, ValueError):
                view = None  # no room for it here: all comes through the connection
        for descriptor in guest.descriptors:
            os.close(descriptor)
        guest.connection.setblocking(True)
        answer = ADMITTED if view is None else MAPPED
        try:
            guest.connection.send(answer)
        except OSError:
            guest.connection.close()
            return None
        return self._admit(guest.connection, boot, guest.far, view)


def keep_alive(connection: socket.socket) -> None:
    """Have the end of a machine, or of the network to it, noticed in about a minute where nothing is said."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def listen(family: int, address: object) -> socket.socket:
    """Return a socket that listens."""
    listening = socket.socket(family)
    try:
        listening.bind(address)  # type: ignore[arg-type]
        listening.listen(_BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening
