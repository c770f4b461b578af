"""The way to one peer: connects when there is something to say, sends in order, and keeps bounded what the peer does not take.

Whoever sends large buffers waits until they have left, or are in memory that the peer sees: they are never sent as they become
later. Who may not wait, because others' messages come through its thread, has them copied.
"""

from __future__ import annotations

import math
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from paceline.errors import RemoteError
from paceline.transport.admission import ANSWER_BYTES, MAPPED, NONCE_BYTES, hello, keep_alive
from paceline.transport.incoming import ENTRY, LENGTH, TICK_S, memory_of
from paceline.transport.readers import READABLE, WRITABLE, Readers
from paceline.transport.sealing import PIECE, TAG_BYTES, Seal, header
from paceline.transport.shared_buffers import UNIT, Arena, BufferPlace, Holder

_MOST_WAITING = 16 << 20
"""So many bytes of small messages may wait for a peer before whoever sends more waits, too."""
_MOST_COPIED = 256 << 20
"""So much is copied for a peer that takes nothing, on behalf of those who may not wait."""
_CONNECT_S = 120.0
_UNANSWERED_MS = 120_000
"""How long what was sent may go without an answer of the peer's machine: Linux would try for a quarter of an hour.

Twice `--hang-timeout`, since Linux counts the time in which a living process takes nothing, too (measured, 6.18). It also
takes the place of the keepalive's count of probes here; where messages come in, a minute of silence is enough.
"""
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True)
class PeerAddress:
    """Where a process is found."""

    boot: bytes
    address: str

    @property
    def sealed(self) -> bool:
        """Whether what is sent there leaves the machine."""
        return self.address.startswith("tcp://")


class _Message:
    """What is left to send of a message."""

    __slots__ = (
        "_at",
        "_head",
        "_large",
        "_place",
        "_seal",
        "begun",
        "done",
        "left",
        "owned",
        "parts",
        "size",
    )

    def __init__(
        self,
        first: memoryview | bytes,
        buffers: list[memoryview],
        head: bytes,
        seal: Seal | None,
        parts: list[BufferPlace],
    ) -> None:
        self.left = first
        self._large, self._head, self._seal, self.parts = buffers, head, seal, parts
        self._at, self._place = 0, 1
        self.begun = self.done = self.owned = False
        self.size = len(first) + sum(map(len, buffers))

    @property
    def borrows(self) -> bool:
        """Whether it is read from memory of the sender's."""
        return bool(self._large) or (self._seal is None and type(self.left) is memoryview)

    def advance(self, sealed: memoryview) -> bool:
        """Make ready what is next; False where there is nothing more. Sealed pieces are made in `sealed`."""
        if not self._large:
            return False
        buffer = self._large[0]
        if self._seal is None:
            self.left = self._large.pop(0)
            return True
        piece = buffer[self._at : self._at + PIECE]
        self._at += len(piece)
        if self._at == len(buffer):
            self._large.pop(0)
            self._at = 0
        self.left = sealed[: len(piece) + TAG_BYTES]
        self._seal.close_into(self._head, self._place, piece, self.left)
        self._place += 1
        return True

    def copy(self) -> None:
        """Be independent of the sender's memory from now on."""
        if self._seal is None:
            self.left = bytes(self.left)
        self._large = [memoryview(bytes(one)) for one in self._large]


class Outgoing:
    """Messages to one peer."""

    def __init__(
        self,
        name: str,
        entry: PeerAddress,
        secret: bytes,
        boot: bytes,
        readers: Readers,
        arena: Callable[[], Arena | None],
        lose: Callable[[str], None],
    ) -> None:
        self.name, self.entry = name, entry
        self._secret, self._boot, self._readers, self._lose = secret, boot, readers, lose
        self._find_arena = arena
        self._seal = Seal(secret, boot, entry.boot) if entry.sealed else None
        self._arena: Arena | None = None
        """Where the peer sees large buffers."""
        self._holder: Holder | None = None
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._connecting: threading.Thread | None = None
        self._connected = threading.Event()
        self._gone = self._reported = self._released = self._owed = False
        self._queue: deque[_Message] = deque()
        self._waiting = self._count = 0
        self._sealed = memoryview(bytearray(PIECE + TAG_BYTES if entry.sealed else 0))

    def send(
        self,
        content: bytes,
        frames: Sequence[memoryview],
        *,
        waits: bool,
        deadline: float = math.inf,
        copies: bool = False,
    ) -> bool:
        """Send a message, from any thread; False where the peer is gone.

        A thread that `waits` does so until large buffers have left; past the deadline, what was not begun is not sent. Where
        others may write to the buffers meanwhile, it `copies` them first: what is sealed is such a copy.
        """
        if self._owed:
            self._report()
        seal = self._seal
        parts, table, buffers = self._place(frames) if frames else ([], b"", [])
        if copies and seal is None:
            buffers = [memoryview(bytes(one)) for one in buffers]
        with self._lock:
            if self._gone:
                self._take_back(parts)
                return False
            if self._waiting > _MOST_COPIED and not waits:
                self._take_back(parts)
                raise RemoteError(f"{self.name} takes nothing of what is sent to it, and much is waiting.")
            if self._connecting is None:
                connecting = threading.Thread(target=self._connect, daemon=True, name="paceline-connecting")
                connecting.start()  # first: where there are no threads any more, the next message tries again
                self._connecting = connecting
            self._count += 1
            head = header(self._boot, self._count, len(frames))
            first = table + content
            if seal is not None:
                first = seal.close(head, 0, first)
                if copies and buffers:  # else there is nothing to wait for
                    buffers, seal = _sealed(seal, head, buffers), None
            whole = b"".join((LENGTH.pack(len(head) + len(first)), head, first))
            sent = 0 if buffers or self._queue else self._try(whole)
            if sent == len(whole):
                return True
            message = _Message(memoryview(whole)[sent:] if sent else whole, buffers, head, seal, parts)
            message.begun, message.owned = sent > 0, copies
            self._queue.append(message)
            self._waiting += message.size
            if len(self._queue) == 1 and not self._flush():
                return False
            if message.done:
                return True
            if not (waits and (message.borrows or self._waiting > _MOST_WAITING)):
                self._copy(message)
                self._arm()
                return True
        return self._wait(message, deadline)

    def _try(self, whole: bytes) -> int:
        """Send a message that is in one part, which most are, with the lock; return how much of it has left."""
        if self._connection is None:
            return 0
        try:
            return self._connection.send(whole, socket.MSG_DONTWAIT)
        except OSError:  # it takes no more, or it is at its end, which is seen later
            return 0
        except BaseException:  # a signal's: nobody knows what has left, so nothing follows
            self._end()
            self.report_apart()
            raise

    def end(self) -> None:
        """Send nothing more."""
        with self._lock:
            self._reported = True
            self._end()

    def release(self) -> None:
        """Stop to look whether the peer lives, when it has nothing of this process's any more."""
        with self._lock:
            self._released = True
            if self._holder is not None:
                self._holder.close()

    def ready(self, _: bool) -> None:
        """Go on, when the connection takes more or is at its end."""
        with self._lock:
            connection = self._connection
            if connection is None:
                return
            ended = _happens(connection, select.POLLIN, 0.0)  # nobody says anything on it
            if not ended and self._flush():
                self._arm(always=True)
                return
        self._report()

    def _place(self, frames: Sequence[memoryview]) -> tuple[list[BufferPlace], bytes, list[memoryview]]:
        """Put large buffers where the peer sees them; return those that are sent, and the list of both."""
        parts, entries, buffers = [], [], []
        for frame in frames:
            part = None
            if self._arena is not None and self._holder is not None and len(frame) >= UNIT:
                part = self._arena.put(frame, self._holder)
            if part is None:
                if len(frame):  # else nothing is read for it
                    buffers.append(frame)
                entries.append(ENTRY.pack(len(frame), 0))
            else:
                parts.append(part)
                entries.append(ENTRY.pack(part.size, part.offset | part.copies))
        return parts, b"".join(entries), buffers

    def _flush(self) -> bool:
        """Send as much as the connection takes, with the lock; False where it is at its end."""
        connection = self._connection
        if connection is None:
            return not self._gone
        queue = self._queue
        try:
            while queue:
                message = queue[0]
                message.begun = True
                while True:
                    sent = connection.send(message.left, socket.MSG_DONTWAIT)
                    if sent < len(message.left):
                        message.left = memoryview(message.left)[sent:]
                    elif not message.advance(self._sealed):
                        break
                queue.popleft()
                message.done = True
                self._waiting -= message.size
        except BlockingIOError:
            return True
        except OSError:
            self._end()
            self.report_apart()
            return False
        except BaseException:  # a signal's: nobody knows what of a message has left, so nothing follows
            self._end()
            self.report_apart()
            raise
        return True

    def _wait(self, message: _Message, deadline: float) -> bool:
        """Send until a message has left, in the thread that wants it sent."""
        try:
            while not message.done:
                connected = self._connected.wait(max(0.0, min(TICK_S, deadline - time.monotonic())))
                if connected and (connection := self._connection) is not None:
                    _happens(connection, select.POLLOUT, min(TICK_S, deadline - time.monotonic()))
                with self._lock:
                    if self._gone or not self._flush():
                        return False
                    if not message.done and time.monotonic() >= deadline:
                        self._part_with(message)
                        return True
        except BaseException:
            with self._lock:
                self._part_with(message)
            raise
        return True

    def _part_with(self, message: _Message) -> None:
        """Leave a message to itself: what was begun is sent to its end, of a copy; the rest is not sent."""
        if message.done or self._gone:
            return
        if message.begun:
            self._copy(message)
        else:
            self._drop(message)
        self._arm()

    def _copy(self, message: _Message) -> None:
        """Make a message independent of the sender's memory; without room for that nothing is sent of what that becomes later."""
        if message.owned:
            return
        try:
            message.copy()
        except BaseException:
            if message.begun:
                self._end()
                self.report_apart()
            else:
                self._drop(message)
            raise

    def _drop(self, message: _Message) -> None:
        self._queue.remove(message)
        self._waiting -= message.size
        self._take_back(message.parts)

    def _take_back(self, parts: list[BufferPlace]) -> None:
        if self._arena is not None:
            for part in parts:
                self._arena.take_back(part)

    def _arm(self, *, always: bool = False) -> None:
        """Have the rest sent when the connection takes more."""
        if self._connection is not None and (self._queue or always):
            self._readers.arm(self._connection.fileno(), WRITABLE if self._queue else READABLE)

    def _connect(self) -> None:
        """Connect, on a thread of its own, and send what waits."""
        connection = None
        try:
            connection = _connected(self.entry.address)
            arena = self._greet(connection)
            with self._lock:
                if self._gone:
                    connection.close()
                    return
                self._arena = arena
                self._connection = connection
                connection.settimeout(None)
                self._readers.add(connection.fileno(), self.ready)
                self._flush()
                self._arm()
                self._connected.set()
        except OSError:
            if connection is not None:
                connection.close()
            with self._lock:
                self._connection = None
                self._end()
            self._report()

    def _greet(self, connection: socket.socket) -> Arena | None:
        """Prove who this is; return the arena if the peer sees it from now on."""
        if self.entry.sealed:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            keep_alive(connection)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNANSWERED_MS)
            nonce = self._hear(connection, NONCE_BYTES)
            connection.sendall(self._boot + hello(self._secret, nonce, self._boot, self.entry.boot))
            self._hear(connection, ANSWER_BYTES)
            return None
        found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        with self._lock:
            if self._released:
                raise ConnectionAbortedError
            self._holder = Holder(_CREDENTIALS.unpack(found)[0])
        arena = self._find_arena()
        if arena is None:
            connection.sendall(self._boot)
        else:
            descriptor = arena.duplicate()
            try:
                socket.send_fds(connection, [self._boot], [descriptor])
            finally:
                os.close(descriptor)
        return arena if self._hear(connection, ANSWER_BYTES) == MAPPED else None

    def _hear(self, connection: socket.socket, size: int) -> bytes:
        connection.settimeout(TICK_S)
        found = b""
        while len(found) < size:
            try:
                part = connection.recv(size - len(found))
            except TimeoutError:
                if self._gone:
                    raise
                continue
            if not part:
                raise ConnectionResetError("the peer turned this process away")
            found += part
        return found

    def _end(self) -> None:
        self._gone = True
        for message in self._queue:
            if not message.begun:
                self._take_back(message.parts)
        self._queue.clear()
        self._waiting = 0
        connection, self._connection = self._connection, None
        if connection is not None:
            self._readers.remove(connection.fileno())
            connection.close()

    def report_apart(self) -> None:
        """Have it said that the peer is gone, by a thread that has no lock: at once, or else by whoever sends next."""
        if self._reported:
            return
        try:
            threading.Thread(target=self._report, daemon=True, name="paceline-connecting").start()
        except RuntimeError:
            self._owed = True

    def _report(self) -> None:
        """Report once that the peer is gone."""
        with self._lock:
            report, self._reported = not self._reported, True
        if report:
            self._lose(self.name)


def _sealed(seal: Seal, head: bytes, buffers: Sequence[memoryview]) -> list[memoryview]:
    """Return the buffers of a message in sealed pieces, which `_Message` would make one by one."""
    found, place = [], 1
    for buffer in buffers:
        pieces = -(-len(buffer) // PIECE)
        whole = memoryview(memory_of(len(buffer) + pieces * TAG_BYTES))  # type: ignore[arg-type]
        for number in range(pieces):
            piece = buffer[number * PIECE : (number + 1) * PIECE]
            begin = number * (PIECE + TAG_BYTES)
            seal.close_into(head, place, piece, whole[begin : begin + len(piece) + TAG_BYTES])
            place += 1
        found.append(whole)
    return found


def _happens(connection: socket.socket, event: int, seconds: float) -> bool:
    """Wait until a connection can be read or written, and return whether that is so."""
    poll = select.poll()
    try:
        poll.register(connection, event)
    except ValueError:  # closed by another thread
        return True
    return bool(poll.poll(1000 * max(0.0, seconds)))


def _connected(address: str) -> socket.socket:
    if address.startswith("ipc://"):
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(address.removeprefix("ipc://"))
        except OSError:
            connection.close()
            raise
        return connection
    found = urlsplit(address)
    return socket.create_connection((str(found.hostname), int(found.port or 0)), timeout=_CONNECT_S)
