"""Requests to other workers and the answers to them: what one worker sends and gets in one session."""

from __future__ import annotations

import functools
import itertools
import math
import struct
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.errors import CallRefusedError, RemoteError
from paceline.remote.failures import gone, late, unsendable
from paceline.remote.names import Roles
from paceline.remote.object_store import Hold, Number, ObjectStore
from paceline.remote.pending import GRANTS, Lift, PendingCall
from paceline.remote.thread_pool import ThreadPool
from paceline.transport.incoming import Received, memory_of
from paceline.transport.mailbox import Mailbox, PeerAddress
from paceline.transport.values import Buffer, Reader, UnsendableError, Vocabulary, Writer

ANSWER, FAILURE, METHOD, FUNCTION, BATCHED, CREATE, FETCH, HOLD, RELEASE, SPOIL, BACKWARD, END_PASS = range(
    12
)
"""What a message is: an answer, or what it asks for."""
KEEPS = 8
"""The value stays with the worker that makes it, under the number of the request, and the caller holds it from then on."""
_ROUTE = struct.Struct("<BBQQ")
"""Kind, flags, the number of the call among its caller's, and the pass that it belongs to: 0 for none."""
_GATHER_S = 0.002
"""How long a release waits for others, so that an owner hears of many at once."""
Serve = Callable[[str, tuple[int, ...], memoryview, Sequence[Buffer]], Callable[[], None] | None]
"""Takes a request of a worker with its route, and returns what carries it out, unless that is done."""


class Pass(Protocol):
    """What notes the tensors of messages for the backward of the pass that these belong to."""

    identity: int

    def departure(self, worker: str, count: int, leaves: list[Tensor]) -> Lift:
        """Note which tensors go to a worker in a call; returns what takes those of its answer."""

    def made(self, number: Number, leaves: list[Tensor]) -> None:
        """Note the tensors of an answer."""


class MessageExchange:
    """The messages of one worker."""

    _serve: Serve

    def __init__(self, rank: int, roles: Roles, mailbox: Mailbox, vocabulary: Vocabulary) -> None:
        self._mailbox, self._vocabulary = mailbox, vocabulary
        self.rank, self.name = rank, roles.names[rank]
        self.ranks = {name: rank for rank, name in enumerate(roles.names)}
        self.numbers = itertools.count(1 + (int.from_bytes(mailbox.boot[:3]) << 28))
        """Distinguishes what this worker creates elsewhere, in this session and all others."""
        self.objects = ObjectStore()
        """What this worker keeps for others."""
        self.pool = ThreadPool()
        self._calls: dict[int, PendingCall] = {}
        self._due = math.inf
        self._errands: SimpleQueue[tuple[str, Hold] | bool] = SimpleQueue()
        """What is released, with its owner; True to look at the time again, False to end. Safe in a finalizer."""
        Thread(target=self._run_errands, daemon=True, name="paceline-errands").start()

    def start(self, peers: dict[str, PeerAddress], serve: Serve, lose: Callable[[str], None]) -> None:
        """Take messages from now on; `serve` takes the requests among them, and `lose` hears who is gone."""
        self._serve = serve
        self._mailbox.start(
            peers,
            self.receive,
            lose,
            submit=self.pool.submit,
            prepare=torch.get_num_threads,  # a thread that never asked computes on all cores
        )

    def reader(self, content: memoryview, frames: Sequence[Buffer], lift: Lift | None = None) -> Reader:
        """Return what reads a message."""
        return Reader(self._vocabulary, content, frames, lift)

    def request(
        self,
        worker: str,
        kind: int,
        value: Any,
        *,
        what: str,
        timeout_s: float,
        keeps: bool = False,
        holds: object = None,
        context: Pass | None = None,
        waits: bool = False,
    ) -> PendingCall:
        """Ask a worker for something; the answer comes to the call that is returned, and is there already if that `waits`.

        What is sent may be written to as soon as this returns. Where the worker takes nothing, it waits as long as the call may.
        """
        call = PendingCall(self._mailbox, self._vocabulary, next(self.numbers), worker, what, timeout_s)
        call.holds = holds
        try:
            head, writer = self._written(worker, value, context is not None)
        except UnsendableError as error:
            raise unsendable(worker, what, str(error)) from None
        except CallRefusedError as error:
            raise CallRefusedError(f"{what} on {worker} was refused: {error}") from None
        if context is not None:
            call.lift = context.departure(worker, call.number, writer.leaves)
        call.take_back = functools.partial(self._take_back, writer.notes)
        self._calls[call.number] = call
        if call.deadline < self._due:
            self._due = call.deadline
            self._errands.put(True)
        if writer.notes:
            self._grant(worker, writer)
        identity = 0 if context is None else context.identity
        route = _ROUTE.pack(kind, KEEPS if keeps else 0, call.number, identity)
        if not waits:
            self._ask(call, route + head, writer.frames)
            return call
        self._mailbox.step_aside()
        with self._mailbox.reading(worker) as reading:  # before it is sent: the answer may be quicker
            self._ask(call, route + head, writer.frames)
            reading.until(call.done)
        return call

    def post(
        self,
        worker: str,
        kind: int,
        value: Any,
        *,
        number: int = 0,
        flags: int = 0,
        context: Pass | None = None,
    ) -> None:
        """Send something that is not answered; a worker that is gone does not get it."""
        head, writer = self._written(worker, value, context is not None)
        if context is not None:
            context.made((self.ranks[worker], number), writer.leaves)
        if writer.notes:
            self._grant(worker, writer)
        route = _ROUTE.pack(kind, flags | (GRANTS if writer.notes else 0), number, 0)
        # An answer may be what a service holds and other threads change, while the caller takes its time.
        answers = kind <= FAILURE
        self._send(worker, route + head, writer.frames, waits=answers, copies=answers)

    def release(self, owner: str, hold: Hold) -> None:
        """Release a hold, soon, and from any place in a program: a finalizer must not wait for anybody."""
        self._errands.put((owner, hold))

    def _take_back(self, granted: Iterable[tuple[str, Hold]]) -> None:
        """Release holds that were handed over to somebody who never heard of them."""
        for owner, hold in granted:
            self.release(owner, hold)

    def lose(self, worker: str) -> None:
        """End every call to a worker that is gone."""
        self._mailbox.forget(worker)
        for call in list(self._calls.values()):
            if call.worker == worker:
                self._give_up(call)

    def close(self) -> None:
        """End: calls that are in flight come to nothing."""
        self._errands.put(False)
        self.pool.close()
        self._mailbox.close()
        for call in list(self._calls.values()):
            if self._calls.pop(call.number, None) is not None:
                call.give_up(
                    lambda call=call: RemoteError(  # type: ignore[misc]
                        f"{call.what} on {call.worker} came to nothing: this worker has left the session."
                    )
                )

    def receive(
        self, sender: str, content: memoryview, frames: Sequence[Buffer]
    ) -> Callable[[], None] | None:
        """Take a message: complete the call that it answers, or return what carries the request out."""
        kind, flags, number, _ = route = _ROUTE.unpack_from(content)
        content = content[_ROUTE.size :]
        if kind <= FAILURE:
            call = self._calls.get(number)
            if call is not None and call.worker == sender and self._calls.pop(number, None) is not None:
                (call.answer if kind == ANSWER else call.fail)(flags, content, frames)
            elif flags & GRANTS and kind == ANSWER:
                self.reader(content, frames).value()  # too late: what it hands over is released again
            return None
        return self._serve(sender, route, content, frames)

    def _written(self, worker: str, value: Any, lifts: bool) -> tuple[bytes, Writer]:
        writer = Writer(self._vocabulary, worker, lifts=lifts)
        return writer.head(value), writer

    def _grant(self, worker: str, writer: Writer) -> None:
        """Have the owners of the references in a message count the worker that gets it, before this one lets go of its own."""
        for owner, (number, token) in writer.notes:
            if owner == self.name:
                self.objects.hold(number, token, worker)
            else:
                self.post(owner, HOLD, [*number, *token, worker])

    def _send(
        self,
        worker: str,
        content: bytes,
        frames: Sequence[memoryview],
        *,
        deadline: float = math.inf,
        waits: bool = True,
        copies: bool = False,
    ) -> bool:
        if worker != self.name:
            return self._mailbox.send(worker, content, frames, deadline=deadline, waits=waits, copies=copies)
        job = self.receive(worker, memoryview(content), [Received(_copied(one)) for one in frames])
        if job is not None:
            self.pool.submit(job)
        return True

    def _ask(self, call: PendingCall, content: bytes, frames: Sequence[memoryview]) -> None:
        if not self._send(call.worker, content, frames, deadline=call.deadline):
            self._give_up(call)

    def _give_up(self, call: PendingCall) -> None:
        if self._calls.pop(call.number, None) is not None:
            call.give_up(lambda: gone(call.worker, call.what))

    def _run_errands(self) -> None:
        """Report to owners what was released, and end calls whose time is over, until the end."""
        while True:
            try:
                self._run_errands_once()
            except _EndedError:
                return
            except Exception:  # noqa: BLE001  (a destructor of the user's: no call would end by its time any more)
                traceback.print_exc(file=sys.stderr)

    def _run_errands_once(self) -> None:
        while True:
            try:
                left = self._due - time.monotonic()
                found = self._errands.get(timeout=None if left == math.inf else max(0.0, left))
            except Empty:
                found = True
            if found is False:
                raise _EndedError
            if found is not True:
                time.sleep(_GATHER_S)
                self._tell([found, *(self._errands.get() for _ in range(self._errands.qsize()))])
            if self._due <= time.monotonic() + _GATHER_S or found is True:
                self._expire()

    def _tell(self, released: list[tuple[str, Hold] | bool]) -> None:
        owned: dict[str, list[Hold]] = defaultdict(list)
        for one in released:
            if isinstance(one, bool):
                self._errands.put(one)
            else:
                owned[one[0]].append(one[1])
        for owner, holds in owned.items():
            if owner == self.name:
                self.objects.release(holds).clear()
            else:
                self.post(owner, RELEASE, [part for hold in holds for pair in hold for part in pair])

    def _expire(self) -> None:
        self._due = math.inf  # first: a call that begins from now on asks for another look
        now, due = time.monotonic(), math.inf
        for call in list(self._calls.values()):
            if call.deadline > now:
                due = min(due, call.deadline)
            elif self._calls.pop(call.number, None) is not None:
                call.give_up(lambda call=call: late(call.worker, call.what, call.timeout_s))  # type: ignore[misc]
        self._due = min(self._due, due)


class _EndedError(Exception):
    """The session is over."""


def _copied(content: memoryview) -> Any:
    """Return a buffer of a message to this worker itself."""
    found = memory_of(len(content))
    memoryview(found)[:] = content  # type: ignore[arg-type]
    return found
