"""Messages between the launchers of several machines: JSON objects over CURVE, with heartbeats, and who has come and gone.

Both ends have a thread of their own that hears and sends, and a descriptor that is readable when there is something to take:
their owner selects on it, whatever else it does in between. A cut that heals within the time-out is survived without a trace.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket as sockets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from paceline.transport import curve
from paceline.transport.addresses import at
from paceline.transport.router import LARGEST_MESSAGE, Handlers, Peer, Router, keep_alive
from paceline.transport.secret import Secret

Message = dict[str, Any]
_ENDED = (
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL,
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL,
    zmq.Event.DISCONNECTED,
    zmq.Event.CLOSED,
)
STRANGER = "it does not know this run's secret, or this machine does not"
CLOSED = "closed the connection"
NOBODY = "nobody answers there"
NO_LEADER = "what takes connections there does not speak as a leader does (a proxy with none behind it, or another program)"
_NEVER_MS = 3_600_000
"""When libzmq would connect again by itself. Where it is told not to (-1), it drops what came in before the end."""
TRY_S = 0.2
"""How long to wait before a leader that does not listen yet is called again."""
GREETING_S = 1.0
"""How long what takes a connection has to show that it speaks our protocol."""
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
"""What a client of libzmq's sends first."""


@dataclass(frozen=True)
class Said:
    """A peer has sent a message."""

    peer: Peer
    message: Message


@dataclass(frozen=True)
class Gone:
    """A peer is gone."""

    peer: Peer
    reason: str


@dataclass(frozen=True)
class Refused:
    """Connections without the run's secret were turned away; so many so far."""

    count: int


Event = Said | Gone | Refused


class _Events:
    """What a thread has heard, for another that selects."""

    def __init__(self) -> None:
        self._heard: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._ready = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Return the descriptor that is readable when `events` has something."""
        return self._ready

    def events(self) -> list[Event]:
        """Return what has happened since, in its order."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._ready)
        return [self._heard.get_nowait() for _ in range(self._heard.qsize())]

    def add(self, event: Event) -> None:
        self._heard.put(event)
        os.eventfd_write(self._ready, 1)

    def hear(self, peer: Peer, frames: list[bytes]) -> None:
        """Take a message; one that is no JSON object comes as an empty one, which says nothing to anybody."""
        try:
            message = json.loads(frames[-1]) if len(frames) == 1 else None
        except (ValueError, RecursionError):
            message = None
        self.add(Said(peer, message if isinstance(message, dict) else {}))

    def close(self) -> None:
        os.close(self._ready)


class ControlServer:
    """The leader's end."""

    def __init__(self, host: str, port: int, secret: Secret, *, silence_s: float) -> None:
        """Listen on a TCP port, 0 for a free one; OSError where that is taken."""
        self._events = _Events()
        handlers = Handlers(
            message=self._events.hear,
            gone=lambda peer, reason: self._events.add(Gone(peer, reason)),
            refused=lambda count: self._events.add(Refused(count)),
        )
        address = f"tcp://{at(host, port or '*')}"
        try:
            self._router = Router(address, handlers, secret=secret, silence_s=silence_s)
        except OSError:
            self._events.close()
            raise
        self.fileno, self.events = self._events.fileno, self._events.events
        self.port = self._router.port

    def send(self, peer: Peer, message: Message) -> None:
        """Send a peer a message; one that is gone does not get it."""
        self._router.send(peer, [encode(message)])

    def close(self) -> None:
        """Stop listening; what was sent is on its way."""
        if self._router.close():
            self._events.close()


class ControlClient:
    """A follower's end: calls the leader until it answers or the time is up, then stays connected until one of them goes.

    `events` tells what the leader says, and one `Gone` when the connection is over, or when none came about.
    """

    LEADER: Peer = b"leader"

    def __init__(
        self,
        host: str,
        port: int,
        secret: Secret,
        *,
        silence_s: float,
        join_s: float,
        bind_to: str | None = None,
    ) -> None:
        self._address = f"tcp://{bind_to + ';' if bind_to else ''}{at(host, port)}"
        self._host, self._port = host, port
        self._secret, self._silence_s, self._join_s = secret, silence_s, join_s
        self._events = _Events()
        self.fileno, self.events = self._events.fileno, self._events.events
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._thread = threading.Thread(target=self._run, name="paceline-control", daemon=True)
        self._thread.start()

    def send(self, message: Message) -> None:
        """Send the leader a message, now or when it is there."""
        self._outgoing.put(encode(message))
        self._ring()

    def close(self) -> None:
        """Part; what was sent is on its way."""
        if self._context.closed:
            return
        self._outgoing.put(None)
        self._ring()
        self._thread.join()
        self._context.term()
        self._events.close()
        os.close(self._wake)

    def _ring(self) -> None:
        os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        deadline = time.monotonic() + self._join_s
        reason = NOBODY
        while True:
            conversation = _Conversation(
                self._context, self._address, self._secret, self._silence_s, self._wake
            )
            try:
                reason = conversation.run(self._events.hear, self._outgoing, deadline) or reason
            finally:
                conversation.close()
            if reason == NO_LEADER and self._is_leader():
                reason = STRANGER
            if reason not in (NOBODY, NO_LEADER) or time.monotonic() >= deadline:
                break
        self._events.add(Gone(self.LEADER, reason))

    def _is_leader(self) -> bool:
        """Return whether what closed a connection without a word is a leader: one with another secret does, as a proxy does."""
        try:
            with sockets.create_connection((self._host, self._port), GREETING_S) as connection:
                connection.settimeout(GREETING_S)
                connection.sendall(_GREETING)
                greeting = b""
                while len(greeting) < len(_GREETING) and (more := connection.recv(len(_GREETING))):
                    greeting += more
        except OSError:
            return False
        return greeting[:1] == b"\xff" and greeting[12:32].rstrip(b"\0") == b"CURVE"


class _Conversation:
    """One attempt to talk to the leader, and the talk."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        secret: Secret,
        silence_s: float,
        wake: int,
    ) -> None:
        self._socket = socket = context.socket(zmq.DEALER)
        curve.call(socket, secret)
        keep_alive(socket, silence_s)
        socket.linger = 0
        socket.reconnect_ivl = _NEVER_MS
        socket.sndhwm = 0
        socket.maxmsgsize = LARGEST_MESSAGE
        socket.ipv6 = "[" in address
        self._monitor = socket.get_monitor_socket()
        self._wake, self._silence_s = wake, silence_s
        self._poller = zmq.Poller()
        for one in (socket, self._monitor, wake):
            self._poller.register(one, zmq.POLLIN)
        socket.connect(address)

    def run(
        self,
        hear: Callable[[Peer, list[bytes]], None],
        outgoing: queue.SimpleQueue[bytes | None],
        deadline: float,
    ) -> str | None:
        """Talk until it is over and return why; NOBODY or NO_LEADER where it may be tried again, None where time is up."""
        is_open, unmet = False, NOBODY
        while True:
            left = None if is_open else max(0, int(1000 * (deadline - time.monotonic())) + 1)
            ready = dict(self._poller.poll(left))
            if not ready and not is_open:
                return None if unmet == NOBODY else unmet
            if self._socket in ready:
                hear(ControlClient.LEADER, self._socket.recv_multipart())
                continue  # all that it said comes before the news that it is gone
            if self._monitor in ready:
                kind = parse_monitor_message(self._monitor.recv_multipart())["event"]
                if kind == zmq.Event.HANDSHAKE_SUCCEEDED:
                    is_open = True
                elif kind == zmq.Event.CONNECTED:
                    unmet = NO_LEADER
                elif kind == zmq.Event.HANDSHAKE_FAILED_AUTH:
                    return STRANGER
                elif kind in _ENDED:
                    if is_open:
                        self._hear_last_words(hear)
                        return CLOSED
                    time.sleep(min(TRY_S, max(0.0, deadline - time.monotonic())))
                    return unmet
            if is_open and not self._send(outgoing):
                return "the connection was closed here"
            if not is_open and self._wake in ready and self._is_to_close(outgoing):
                return "the connection was closed here"

    def _hear_last_words(self, hear: Callable[[Peer, list[bytes]], None]) -> None:
        """Take what came in before the end, but after it was looked whether anything had."""
        with contextlib.suppress(zmq.Again):
            while True:
                hear(ControlClient.LEADER, self._socket.recv_multipart(zmq.NOBLOCK))

    def _send(self, outgoing: queue.SimpleQueue[bytes | None]) -> bool:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while True:
            try:
                message = outgoing.get_nowait()
            except queue.Empty:
                return True
            if message is None:
                self._socket.linger = 500
                return False
            self._socket.send(message)

    def _is_to_close(self, outgoing: queue.SimpleQueue[bytes | None]) -> bool:
        """Return whether the owner has closed before anybody answered; keep what waits to be sent."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        waiting = [outgoing.get_nowait() for _ in range(outgoing.qsize())]
        for one in waiting:
            outgoing.put(one)
        return None in waiting

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()


def encode(message: Message) -> bytes:
    """Write a message; one that is too large is an error here, where it is made."""
    frame = json.dumps(message).encode()
    if len(frame) > LARGEST_MESSAGE:
        raise ValueError(
            f"a message of {len(frame)} bytes is more than a connection takes ({LARGEST_MESSAGE})"
        )
    return frame
