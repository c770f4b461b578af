"""The end of a conversation that many connect to: one ZeroMQ ROUTER socket, served by a thread that does nothing else.

The thread hears every peer, notices at once when a connection is gone, and hands both to its owner. What the owner does with its
own thread (a slow disk, a paused terminal) delays nobody: libzmq's I/O thread answers heartbeats, this one takes messages.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket as sockets
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import parse_monitor_message

from paceline.transport import curve
from paceline.transport.secret import Secret

HEARTBEAT_S = 1.0
LARGEST_MESSAGE = 64 << 20
_BATCH = 256
"""How many messages are taken before connections that are gone are looked at."""
_LAST_WORDS = 100_000
"""How many are taken when a connection is gone."""
_WAITING = 10_000
"""How many messages may wait for a peer that takes none, before it counts as gone."""
_REFUSED = {
    zmq.Event.HANDSHAKE_FAILED_AUTH,
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL,
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL,
}
Peer = bytes
"""ZeroMQ's name for a connection."""


@dataclass
class Handlers:
    """What a router's thread calls; neither may wait for anybody."""

    message: Callable[[Peer, list[bytes]], None]
    gone: Callable[[Peer, str], None]
    refused: Callable[[int], None] = lambda _: None
    """A connection came without the secret; with the number of them so far."""


@dataclass
class _Connection:
    """One that stands."""

    descriptor: int
    inode: int
    """Which socket it was when it was accepted: a descriptor that is closed may be another file's at once."""
    peer: Peer | None = None
    """Who has spoken on it."""


class Router:
    """Listens on one address until it is closed."""

    def __init__(
        self,
        address: str,
        handlers: Handlers,
        *,
        secret: Secret | None = None,
        silence_s: float | None = None,
    ) -> None:
        """`address` is `ipc://PATH` (no secret: the folder's permissions are the lock) or `tcp://HOST:PORT`.

        A peer of which nothing is heard for `silence_s` is gone; None leaves that to the operating system.
        """
        self._handlers = handlers
        self._open: dict[int, _Connection] = {}
        """The connections that stand, by descriptor."""
        self._ended: list[Peer] = []
        """Whose connection is gone, and nobody was told yet."""
        self._refused = 0
        self._peers: dict[Peer, _Connection | None] = {}
        """Who has spoken, with the connection where that still stands."""
        self._cut: set[Peer] = set()
        """Who was given up and disconnected: what it said before is passed over."""
        self._outgoing: queue.SimpleQueue[tuple[Peer, Sequence[bytes]] | None] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.max_sockets = 65_000
        try:
            self._socket = self._context.socket(zmq.ROUTER)
            self._door = None if secret is None else curve.Doorkeeper(self._context, secret)
            if secret is not None:
                curve.serve(self._socket, secret)
            keep_alive(self._socket, silence_s)
            self._monitor = self._socket.get_monitor_socket(_REFUSED_OR_CHANGED)
            self._bind(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            os.close(self._wake)
            raise OSError(error.errno, error.strerror) from None
        self.address = bytes(self._socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
        """Where it listens, with the port that was chosen."""
        self._thread = threading.Thread(target=self._serve, name="paceline-router", daemon=True)
        self._thread.start()

    def _bind(self, address: str) -> None:
        socket = self._socket
        socket.linger = 0
        socket.router_mandatory = True
        socket.sndhwm = _WAITING
        socket.maxmsgsize = LARGEST_MESSAGE
        socket.backlog = 4096
        socket.ipv6 = address.startswith("tcp://[")
        socket.bind(address)

    @property
    def port(self) -> int:
        """The TCP port it listens on."""
        return int(self.address.rpartition(":")[2])

    def send(self, peer: Peer, frames: Sequence[bytes]) -> None:
        """Send a peer a message; one that is gone does not get it."""
        if threading.current_thread() is self._thread:
            self._put(peer, frames)
        elif self._thread.is_alive():
            self._outgoing.put((peer, frames))
            os.eventfd_write(self._wake, 1)

    def close(self) -> bool:
        """Send what waits as far as the network takes it at once, and stop listening; False where that was done before."""
        if not self._thread.is_alive():
            return False
        self._outgoing.put(None)
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)  # not by the thread: it may end before it is woken
        return True

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        for one in (self._socket, self._monitor, *([] if self._door is None else [self._door.socket])):
            poller.register(one, zmq.POLLIN)
        going = True
        while going:
            ready = dict(poller.poll())
            if self._door is not None and self._door.socket in ready:
                self._guard(self._door.answer)
            self._guard(self._hear)
            going = self._send_waiting()
        self._socket.linger = 500
        self._end()

    def _guard(self, do: Callable[..., None], *args: object) -> None:
        """Have one message cost at most itself: the others depend on this thread."""
        try:
            do(*args)
        except Exception as error:  # noqa: BLE001
            sys.stderr.write(f"paceline: a message was dropped: {type(error).__name__}: {error}\n")

    def _hear(self) -> None:
        """Take messages, and look which connections are gone: of those that are, everything is heard first."""
        messages, gone = self._received(_BATCH), -1
        while len(self._ended) > gone:
            gone = len(self._ended)
            self._look()
            if len(self._ended) > gone:  # what they said last may have come in since
                messages += self._received(_LAST_WORDS)
        for peer, *frames in messages:
            self._guard(self._take, peer.bytes, frames)
        ended, self._ended = self._ended, []
        for name in ended:
            self._cut.discard(name)  # all that it had said was passed over above
            self._guard(self._drop, name, "closed the connection")

    def _received(self, most: int) -> list[list[zmq.Frame]]:
        messages: list[list[zmq.Frame]] = []
        while len(messages) < most:
            try:
                messages.append(self._socket.recv_multipart(zmq.NOBLOCK, copy=False))
            except zmq.Again:
                break
            except zmq.ZMQError as error:  # a connection broke in the middle
                if error.errno != zmq.EHOSTUNREACH:
                    raise
        return messages

    def _take(self, name: Peer, frames: Sequence[zmq.Frame]) -> None:
        if name in self._cut:
            return
        if name not in self._peers and frames:
            self._greet(name, int(frames[0].get(zmq.SRCFD)))
        self._handlers.message(name, [one.bytes for one in frames])

    def _greet(self, name: Peer, descriptor: int) -> None:
        """Take note of a peer that speaks for the first time, perhaps for the last, too."""
        self._peers[name] = connection = self._open.get(descriptor)
        if connection is None:
            self._ended.append(name)
            return
        if connection.peer is not None:  # it spoke on one that is closed, whose descriptor this one has now
            self._ended.append(connection.peer)
        connection.peer = name

    def _look(self) -> None:
        """Take note of connections that came, went, or were turned away."""
        while True:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            kind, descriptor = event["event"], int(event["value"])
            if kind == zmq.Event.ACCEPTED:
                self._open[descriptor] = _Connection(descriptor, _inode(descriptor))
            elif kind == zmq.Event.DISCONNECTED:
                connection = self._open.pop(descriptor, None)
                if connection is not None and connection.peer is not None:
                    self._ended.append(connection.peer)
            elif kind in _REFUSED:
                self._refused += 1
                self._guard(self._handlers.refused, self._refused)

    def _send_waiting(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while True:
            try:
                item = self._outgoing.get_nowait()
            except queue.Empty:
                return True
            if item is None:
                return False
            self._guard(self._put, *item)

    def _put(self, peer: Peer, frames: Sequence[bytes]) -> None:
        try:
            self._socket.send_multipart([peer, *frames], zmq.NOBLOCK)
        except zmq.Again:
            self._disconnect(peer)
            self._drop(peer, "takes nothing of what is sent to it")
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise

    def _disconnect(self, peer: Peer) -> None:
        """End the connection of a peer that is given up, so that it learns of that; libzmq has no call for it."""
        self._look()
        connection = self._peers.get(peer)
        if connection is None or self._open.get(connection.descriptor) is not connection:
            return
        self._cut.add(peer)
        with contextlib.suppress(OSError):
            held = os.dup(connection.descriptor)  # from here on the number cannot become another file's
            with sockets.socket(fileno=held) as same:
                if os.fstat(held).st_ino == connection.inode:
                    same.shutdown(sockets.SHUT_RDWR)

    def _drop(self, peer: Peer, reason: str) -> None:
        if peer in self._peers:
            del self._peers[peer]
            self._handlers.gone(peer, reason)

    def _end(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()
        if self._door is not None:
            self._door.socket.close()
        self._context.term()


_REFUSED_OR_CHANGED = (
    zmq.Event.ACCEPTED
    | zmq.Event.DISCONNECTED
    | zmq.Event.HANDSHAKE_FAILED_AUTH
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
)


def _inode(descriptor: int) -> int:
    """Return which file a descriptor is; 0 for one that is closed already."""
    try:
        return os.fstat(descriptor).st_ino
    except OSError:
        return 0


def keep_alive(socket: zmq.Socket[bytes], silence_s: float | None) -> None:
    """Have libzmq send heartbeats on a socket's connections, and close one of which nothing is heard for so long."""
    if silence_s is not None:
        socket.heartbeat_ivl = int(1000 * min(HEARTBEAT_S, silence_s / 5))
        socket.heartbeat_timeout = int(1000 * silence_s)
        socket.heartbeat_ttl = int(1000 * min(silence_s, 6000))
