"""The connection between the leader's launcher and another machine's: authenticated messages and heartbeats. No torch.

A message is a JSON object behind its length. Both ends prove that they know the run's secret before either
believes a word (`handshake.py`). Each sends a heartbeat every second and listens for the other's, so that a cut is
noticed by both on their own.

Nothing here blocks, waits or raises because of the other end: whoever owns a link selects on it, hands it
what is ready, calls `tick`, and asks `lost` why it is over. TCP keeps what was sent during a cut and
delivers it afterwards: a cut that heals within the time-out is survived without a trace.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import struct
import time
from typing import Any

from paceline.launch.nodes.handshake import Handshake
from paceline.world.interfaces import family

TIMEOUT_S = 15.0
HEARTBEAT_S = 1.0
LARGEST_MESSAGE = 16 << 20
LARGEST_GREETING = 256
"""What an end that has proved nothing yet may make us hold."""
LARGEST_BACKLOG = 64 << 20
_LENGTH = struct.Struct("!I")
_HEARTBEAT = _LENGTH.pack(0)
_CHUNK = 1 << 16
_TCP_RTO_MAX_MS = 44
"""Linux 6.15 and later. Without it TCP tries again ever more rarely: a cut of 13 s may be felt for 25 s."""

Message = dict[str, Any]


class Link:
    """One end of a connection between two launchers; made by `connect` or by a `Listener`."""

    def __init__(
        self,
        channel: socket.socket,
        peer: str,
        secret: bytes,
        *,
        leads: bool,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.peer = peer
        """What the other end is called in sentences; its owner may know a better name."""
        self._channel = channel
        self._handshake = Handshake(secret, leads=leads)
        self._timeout_s = timeout_s
        self._heartbeat_s = min(HEARTBEAT_S, timeout_s / 5)
        self._incoming, self._outgoing = bytearray(), bytearray()
        self._held_back: list[bytes] = []
        self._ended: str | None = None
        self._heard = self._spoke = time.monotonic()
        self._greet(self._handshake.opening())

    @property
    def is_open(self) -> bool:
        """Return whether both ends have proved themselves and the connection stands."""
        return self._handshake.done and self._ended is None

    @property
    def wants_to_write(self) -> bool:
        """Return whether `on_writable` has something to do."""
        return self._ended is None and bool(self._outgoing)

    def fileno(self) -> int:
        """Return the descriptor to select on; -1 once the link is over, so unregister it before you call on it."""
        return self._channel.fileno()

    def send(self, message: Message) -> None:
        """Send a message, or keep it until the link is open and the network takes it; a lost link drops it."""
        frame = _frame(message)
        if len(frame) - _LENGTH.size > LARGEST_MESSAGE:
            raise ValueError(f"a message of {len(frame)} bytes is more than a link takes ({LARGEST_MESSAGE})")
        if self._handshake.done:
            self._put(frame)
        else:
            self._held_back.append(frame)

    def on_readable(self) -> list[Message]:
        """Take in what has arrived, and give the messages that are complete."""
        messages: list[Message] = []
        while self._ended is None:
            try:
                chunk = self._channel.recv(_CHUNK)
            except BlockingIOError:
                break
            except OSError as error:
                self._break(error)
                break
            if not chunk:
                self._end(f"{self.peer} closed the connection")
                break
            self._incoming += chunk
            self._unpack(messages)
            if self._handshake.done:  # before that, the time-out is for the whole exchange
                self._heard = time.monotonic()
            if len(chunk) < _CHUNK:
                break
        return messages

    def on_writable(self) -> None:
        """Hand the network what waits."""
        if not self.wants_to_write:
            return
        try:
            sent = self._channel.send(self._outgoing)
        except BlockingIOError:
            return
        except (BrokenPipeError, ConnectionResetError):
            self._outgoing.clear()  # its last words may lie unread: the reading side ends the link
        except OSError as error:
            self._break(error)
        else:
            del self._outgoing[:sent]

    def tick(self, now: float) -> float:
        """Send a heartbeat when one is due; give the seconds until something is due again."""
        if not self.is_open:
            return max(0.0, self._heard + self._timeout_s - now)
        if now - self._spoke >= self._heartbeat_s:
            self._spoke = now
            if not self._outgoing:  # else there is enough on its way
                self._put(_HEARTBEAT)
        due = min(self._heard + self._timeout_s, self._spoke + self._heartbeat_s)
        return max(0.0, due - now)

    def lost(self, now: float) -> str | None:
        """Return in one sentence why this link is over, or None while it is not."""
        if self._ended is not None or now - self._heard <= self._timeout_s:
            return self._ended
        if not self._handshake.done:
            self._end(f"no link came about with {self.peer} within {self._timeout_s:g} s")
        # Whoever was stopped for a while must not take its own silence for the other's: it reads first.
        elif not self._has_unread():
            self._end(f"nothing was heard from {self.peer} for {self._timeout_s:g} s")
        return self._ended

    def close(self) -> None:
        """Let go of the connection; what the network has not taken by now is dropped."""
        self._end("the link was closed here")

    def _put(self, frame: bytes) -> None:
        if self._ended is not None:
            return
        self._outgoing += frame
        if len(self._outgoing) > LARGEST_BACKLOG:
            self._end(f"{self.peer} takes nothing of what is sent to it: {len(self._outgoing)} bytes wait")
            return
        self.on_writable()

    def _unpack(self, messages: list[Message]) -> None:
        while self._ended is None and len(self._incoming) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._incoming)
            largest = LARGEST_MESSAGE if self._handshake.done else LARGEST_GREETING
            if length > largest:
                self._end(f"{self.peer} announced a message of {length} bytes; the most is {largest}")
            elif len(self._incoming) < _LENGTH.size + length:
                return
            else:
                body = bytes(self._incoming[_LENGTH.size : _LENGTH.size + length])
                del self._incoming[: _LENGTH.size + length]
                if body:
                    self._take(body, messages)

    def _take(self, body: bytes, messages: list[Message]) -> None:
        try:
            message = json.loads(body)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            self._end(f"{self.peer} sent a message that is no JSON object")
        elif self._handshake.done:
            messages.append(message)
        else:
            self._greet(self._handshake.take(message))

    def _greet(self, greeting: dict[str, str] | None) -> None:
        if self._handshake.refused:
            self._end(f"{self.peer} does not know this run's secret")
            return
        if greeting is not None:
            self._put(_frame(greeting))
        if self._handshake.done:
            held_back, self._held_back = self._held_back, []
            for frame in held_back:
                self._put(frame)

    def _has_unread(self) -> bool:
        try:
            return bool(self._channel.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    def _break(self, error: OSError) -> None:
        self._end(f"the connection to {self.peer} broke: {error.strerror or error}")

    def _end(self, reason: str) -> None:
        if self._ended is None:
            self._ended = reason
            self._channel.close()


class Listener:
    """Where the leader's launcher takes in the others; bound to one address, usually that of the rendezvous."""

    def __init__(self, address: str, secret: bytes, *, port: int = 0, timeout_s: float = TIMEOUT_S) -> None:
        self._secret = secret
        self._timeout_s = timeout_s
        self._listening = socket.create_server((address, port), family=family(address), backlog=128)
        self._listening.setblocking(False)

    @property
    def port(self) -> int:
        """Return the port that it listens on."""
        return int(self._listening.getsockname()[1])

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when somebody comes."""
        return self._listening.fileno()

    def accept(self) -> Link | None:
        """Take in whoever came, to be believed once its link is open; None when it has gone again."""
        try:
            channel, address = self._listening.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return None
        _tune(channel)
        peer = _name(*address[:2])
        return Link(channel, peer, self._secret, leads=True, timeout_s=self._timeout_s)

    def close(self) -> None:
        """Take in nobody any more."""
        self._listening.close()


def connect(address: str, port: int, secret: bytes, *, timeout_s: float = TIMEOUT_S) -> Link:
    """Begin a link to the leader's launcher; whether it comes about, `is_open` and `lost` tell later."""
    channel = socket.socket(family(address), socket.SOCK_STREAM)
    _tune(channel)
    status = channel.connect_ex((address, port))
    link = Link(channel, _name(address, port), secret, leads=False, timeout_s=timeout_s)
    if status not in (0, errno.EINPROGRESS):
        link._break(OSError(status, os.strerror(status)))  # noqa: SLF001  (made here)
    return link


def _tune(channel: socket.socket) -> None:
    channel.setblocking(False)
    channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError):  # older kernels do not know it
        channel.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, 1000)


def _frame(message: Message) -> bytes:
    body = json.dumps(message, separators=(",", ":")).encode()
    return _LENGTH.pack(len(body)) + body


def _name(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
