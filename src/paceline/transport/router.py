"""The end of a conversation that many connect to: one ZeroMQ ROUTER socket, served by a thread that does nothing else.

The thread hears every peer, notices at once when a connection is gone, and hands both to its owner. What the owner does with its
own thread (a slow disk, a paused terminal) delays nobody: libzmq's I/O thread answers heartbeats, this one takes messages.
"""

from __future__ import annotations

import contextlib
import os
import queue
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
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.max_sockets = 65_000
        self._socket = socket = self._context.socket(zmq.ROUTER)
        self._door = None if secret is None else curve.Doorkeeper(self._context, secret)
        if secret is not None:
            curve.serve(socket, secret)
        socket.linger = 0
        socket.router_mandatory = True
        socket.sndhwm = _WAITING
        socket.maxmsgsize = LARGEST_MESSAGE
        socket.backlog = 4096
        keep_alive(socket, silence_s)
        socket.ipv6 = address.startswith("tcp://[")
        self._monitor = socket.get_monitor_socket(_REFUSED_OR_CHANGED)
        self._connections: dict[int, int] = {}
        """The number of the latest connection on each descriptor: descriptors are used again."""
        self._open: dict[int, Peer | None] = {}
        """The connections that stand, by number, with the name of who has spoken on it."""
        self._ended: list[Peer] = []
        """Whose connection is gone, and nobody was told yet."""
        self._accepted = self._refused = 0
        self._peers: set[Peer] = set()
        self._outgoing: queue.SimpleQueue[tuple[Peer, Sequence[bytes]] | None] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            self._end()
            os.close(self._wake)
            raise OSError(error.errno, error.strerror) from None
        self.address = bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
        """Where it listens, with the port that was chosen."""
        self._thread = threading.Thread(target=self._serve, name="paceline-router", daemon=True)
        self._thread.start()

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
            try:
                if self._door is not None and self._door.socket in ready:
                    self._door.answer()
                self._hear()
                going = self._send_waiting()
            except Exception as error:  # noqa: BLE001  (one message costs at most itself: the others depend on this thread)
                _log_dropped(error)
        self._socket.linger = 500
        self._end()

    def _hear(self) -> None:
        """Take messages, then look which connections are gone: in this order, so that last words are heard."""
        messages = []
        for _ in range(_BATCH):
            try:
                messages.append(self._socket.recv_multipart(zmq.NOBLOCK, copy=False))
            except zmq.Again:
                break
            except zmq.ZMQError as error:  # a connection broke in the middle
                if error.errno != zmq.EHOSTUNREACH:
                    raise
        self._look()
        for peer, *frames in messages:
            name = peer.bytes
            if name not in self._peers and frames:
                self._greet(name, int(frames[0].get(zmq.SRCFD)))
            try:
                self._handlers.message(name, [one.bytes for one in frames])
            except Exception as error:  # noqa: BLE001  (one message costs at most itself, not what came with it)
                _log_dropped(error)
        ended, self._ended = self._ended, []
        for name in ended:
            self._drop(name, "closed the connection")

    def _greet(self, name: Peer, descriptor: int) -> None:
        """Take note of a peer that speaks for the first time, perhaps for the last, too."""
        self._peers.add(name)
        number = self._connections.get(descriptor, 0)
        if number in self._open:
            self._open[number] = name
        else:
            self._ended.append(name)

    def _look(self) -> None:
        """Take note of connections that came, went, or were turned away."""
        while True:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            kind, descriptor = event["event"], event["value"]
            if kind == zmq.Event.ACCEPTED:
                self._accepted += 1
                self._connections[descriptor] = self._accepted
                self._open[self._accepted] = None
            elif kind == zmq.Event.DISCONNECTED:
                name = self._open.pop(self._connections.get(descriptor, 0), None)
                if name is not None:
                    self._ended.append(name)
            elif kind in _REFUSED:
                self._refused += 1
                self._handlers.refused(self._refused)

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
            self._put(*item)

    def _put(self, peer: Peer, frames: Sequence[bytes]) -> None:
        try:
            self._socket.send_multipart([peer, *frames], zmq.NOBLOCK)
        except zmq.Again:
            self._drop(peer, "takes nothing of what is sent to it")
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise

    def _drop(self, peer: Peer, reason: str) -> None:
        if peer in self._peers:
            self._peers.remove(peer)
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


def _log_dropped(error: Exception) -> None:
    sys.stderr.write(f"paceline: a message was dropped: {type(error).__name__}: {error}\n")


def keep_alive(socket: zmq.Socket[bytes], silence_s: float | None) -> None:
    """Have libzmq send heartbeats on a socket's connections, and close one of which nothing is heard for so long."""
    if silence_s is not None:
        socket.heartbeat_ivl = int(1000 * min(HEARTBEAT_S, silence_s / 5))
        socket.heartbeat_timeout = int(1000 * silence_s)
        socket.heartbeat_ttl = int(1000 * min(silence_s, 6000))
