"""Messages of one peer as they come out of its connection: whole, in order, and known to be the peer's own."""

from __future__ import annotations

import select
import socket
import struct
import threading
from collections.abc import Callable, Generator, Iterator, Sequence

import numpy as np

from paceline.transport.readers import Job
from paceline.transport.sealing import (
    HEADER_BYTES,
    LARGEST_HEAD,
    PIECE,
    TAG_BYTES,
    Seal,
    SealError,
    read_header,
)
from paceline.transport.shared_buffers import Bytes, SharedView

LENGTH = struct.Struct("<I")
"""What stands before how a message begins: its size."""
ENTRY = struct.Struct("<QQ")
"""A buffer's size, and where it is: 0 for behind the beginning, or its place in the sender's arena, odd if it is to be copied."""
_BUFFER = 64 << 10
_ALIGNED = 64
TICK_S = 0.1
"""How long a thread that reads waits before it looks whether it is still wanted."""
_TICK = struct.pack("ll", 0, int(TICK_S * 1e6))


class EndedError(Exception):
    """The connection is at its end."""


class Received:
    """A buffer that has arrived; whoever takes its memory has it alone."""

    def __init__(self, memory: Bytes, *, copies: bool = False) -> None:
        self._memory: Bytes | None = memory
        self._copies = copies
        self.size = len(memory)

    def take(self) -> Bytes:
        """Return the memory, once."""
        memory, self._memory = self._memory, None
        if memory is None:
            raise ValueError("a buffer is named twice")
        if not self._copies:
            return memory
        found = memory_of(self.size)
        np.copyto(found, memory)  # lets other threads run meanwhile
        return found


Message = tuple[memoryview, list[Received]]
Receive = Callable[[str, memoryview, Sequence[Received]], Job | None]
"""Takes a message, and returns what is to be done after the next one may be taken."""


class Incoming:
    """A peer's connection to this process. Whoever has `lock` reads."""

    def __init__(
        self, connection: socket.socket, name: str, boot: bytes, seal: Seal | None, view: SharedView | None
    ) -> None:
        self.name = name
        self.lock = threading.Lock()
        self.connection, self.ended = connection, False
        self._boot, self._seal, self._view = boot, seal, view
        self._buffer = memoryview(bytearray(_BUFFER))
        self._begin = self._end = 0
        self._sealed: memoryview | None = None
        self._arrival = select.poll()
        self._arrival.register(connection, select.POLLIN)
        self.messages: Generator[Message | None] = self._read()
        """Reads what is there: gives each message that is whole, and None where it is time to look at something else.

        Everything before None is to be taken: nobody is woken for what has been read. It goes on where it was, in the middle of
        a message too, and raises EndedError or SealError at the end.
        """
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TICK)

    def wait(self) -> None:
        """Wait for something to read, for a moment: a signal may end this, which changes nothing."""
        self._arrival.poll(1000 * TICK_S)

    def _read(self) -> Generator[Message | None]:
        while True:
            if self._begin:
                self._compact()
            count = self._receive(self._buffer[self._end :], socket.MSG_DONTWAIT)
            if count:
                self._end += count
                yield from self._whole()
            yield None

    def _receive(self, target: memoryview, flags: int) -> int:
        """Read what has come, as far as it fits, and return how much that is; raise EndedError at the end."""
        try:
            count = self.connection.recv_into(target, 0, flags)
        except BlockingIOError:
            return 0
        except OSError:
            raise EndedError from None
        if count == 0:
            raise EndedError
        return count

    def _whole(self) -> Iterator[Message | None]:
        """Return the messages that have come in, and read on where one is too large for the buffer."""
        while self._end - self._begin >= LENGTH.size:
            (size,) = LENGTH.unpack_from(self._buffer, self._begin)
            if size < HEADER_BYTES or size > LARGEST_HEAD + HEADER_BYTES + TAG_BYTES:
                raise SealError("it has no size that a message has")
            begin, end = self._begin + LENGTH.size, self._begin + LENGTH.size + size
            if end <= self._end:
                first = memoryview(bytes(self._buffer[begin:end]))
                self._begin = end
            elif LENGTH.size + size <= _BUFFER:
                break
            else:
                self._begin = begin
                first = memoryview(bytearray(size))
                yield from self._fill(first)
            content, head, number = self._opened(first)
            yield (yield from self._with_buffers(content, head, number)) if number else (content, [])

    def end(self) -> None:
        """Have whoever reads come to the end."""
        try:
            self.connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def close(self) -> None:
        """Read no more; with the lock."""
        self.ended = True
        self.messages.close()
        self.connection.close()

    def _opened(self, first: memoryview) -> tuple[memoryview, bytes, int]:
        """Return what a message says first, its header where it is sealed, and how many buffers there are."""
        boot, count, number = read_header(first)
        if boot != self._boot:
            raise SealError("it does not name whom the connection is from")
        content, head, seal = first[HEADER_BYTES:], b"", self._seal
        if seal is not None:
            head = bytes(first[:HEADER_BYTES])
            content = memoryview(seal.open(head, 0, content))
            seal.check(count)  # only now is it known to be the sender's own
        return content, head, number

    def _with_buffers(
        self, content: memoryview, head: bytes, number: int
    ) -> Generator[None, None, tuple[memoryview, list[Received]]]:
        if len(content) < number * ENTRY.size:
            raise SealError("it is cut short")
        entries = ENTRY.iter_unpack(content[: number * ENTRY.size])
        buffers, place = [], 1
        for size, where in entries:
            if where:
                if self._view is None:
                    raise SealError("it names memory that is not there")
                try:
                    buffers.append(Received(self._view.part(where & ~1, size), copies=bool(where & 1)))
                except ValueError as error:
                    raise SealError(str(error)) from None
                continue
            memory = memory_of(size)
            target = memoryview(memory)  # type: ignore[arg-type]
            if self._seal is None:
                yield from self._fill(target)
            else:
                place = yield from self._open(self._seal, head, place, target)
            buffers.append(Received(memory))
        return content[number * ENTRY.size :], buffers

    def _open(self, seal: Seal, head: bytes, place: int, target: memoryview) -> Generator[None, None, int]:
        """Read and open the pieces of a buffer; return the place after them."""
        if self._sealed is None:
            self._sealed = memoryview(bytearray(PIECE + TAG_BYTES))
        for begin in range(0, len(target), PIECE):
            part = target[begin : begin + PIECE]
            sealed = self._sealed[: len(part) + TAG_BYTES]
            yield from self._fill(sealed)
            seal.open_into(head, place, sealed, part)
            place += 1
        return place

    def _fill(self, target: memoryview) -> Iterator[None]:
        """Read so many bytes; the peer may stop in the middle of them."""
        there = min(self._end - self._begin, len(target))
        target[:there] = self._buffer[self._begin : self._begin + there]
        self._begin += there
        while there < len(target):
            there += self._receive(target[there:], socket.MSG_WAITALL)
            if there < len(target):  # it took longer than a moment
                yield None

    def _compact(self) -> None:
        left = self._end - self._begin
        self._buffer[:left] = bytes(self._buffer[self._begin : self._end])
        self._begin, self._end = 0, left


def memory_of(size: int) -> Bytes:
    """Return memory that lies as torch would have it."""
    raw = np.empty(size + _ALIGNED, np.uint8)
    begin = -raw.__array_interface__["data"][0] % _ALIGNED
    return raw[begin : begin + size]
