"""The requests of others: what a handler knows of one and how it answers, and which handler takes which kind."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from paceline.errors import CallRefusedError
from paceline.remote.exchange import ANSWER, FAILURE, KEEPS
from paceline.remote.failures import CallFailure
from paceline.remote.gradients import Context
from paceline.remote.object_store import Number
from paceline.remote.pending import UNREAD, UNSENDABLE
from paceline.remote.session import Session
from paceline.transport.values import Buffer, UnsendableError

Handler = Callable[["IncomingCall"], None]
_handlers: dict[int, Handler] = {}
_in_order: set[int] = set()


def handles(kind: int, *, in_order: bool = False) -> Callable[[Handler], Handler]:
    """Mark what answers a kind of request: on a thread of its own or, if `in_order`, before the sender's next one is read."""

    def mark(handler: Handler) -> Handler:
        _handlers[kind] = handler
        if in_order:
            _in_order.add(kind)
        return handler

    return mark


class IncomingCall:
    """What another worker asks for."""

    __slots__ = ("_content", "_frames", "_pass", "caller", "exchange", "keeps", "number", "session")

    def __init__(
        self, session: Session, caller: str, route: tuple[int, ...], content: memoryview, frames: Any
    ) -> None:
        _, flags, count, self._pass = route
        self.session, self.exchange, self.caller = session, session.exchange, caller
        self.number: Number = (self.exchange.ranks[caller], count)
        self.keeps = bool(flags & KEEPS)
        self._content, self._frames = content, frames

    def context(self) -> Context | None:
        """Return the pass that the caller is in."""
        return self.session.passes.find(self._pass) if self._pass else None

    def read(self, context: Context | None = None) -> Any:
        """Return what the message says; tensors in it that require gradients are noted in the pass."""
        content, frames, self._frames = self._content, self._frames, ()
        lift = None if context is None else functools.partial(context.arrival, self.caller, self.number)
        return self.exchange.reader(content, frames, lift).value()

    def answer(self, value: Any, context: Context | None = None) -> None:
        """Answer with a value or a `CallFailure`; one that is to stay here is kept, and the caller hears that it is there."""
        if self.keeps:
            self.session.objects.put(self.number, value)
            value = value if type(value) is CallFailure else None
        self.send(value, context)

    def send(self, value: Any, context: Context | None = None) -> None:
        """Send an answer."""
        if type(value) is CallFailure:
            self.exchange.post(self.caller, FAILURE, value.state(), number=self.number[1])
            return
        try:
            self.exchange.post(self.caller, ANSWER, value, number=self.number[1], context=context)
        except UnsendableError as error:
            self.exchange.post(self.caller, FAILURE, str(error), number=self.number[1], flags=UNSENDABLE)
        except CallRefusedError as error:
            self.refuse(error, read=True)

    def refuse(self, error: CallRefusedError, *, read: bool = False) -> None:
        """Report that something may not be, here in the log and to the caller."""
        print(f"paceline: refused: {error}", file=sys.stderr)  # noqa: T201  (the worker's log)
        failure = CallFailure.of(error, self.session.name)
        if self.keeps:
            self.session.objects.put(self.number, failure)
        flags = 0 if read else UNREAD
        self.exchange.post(self.caller, FAILURE, failure.state(), number=self.number[1], flags=flags)


def take(
    session: Session, sender: str, route: tuple[int, ...], content: memoryview, frames: Sequence[Buffer]
) -> Callable[[], None] | None:
    """Take a request: return what carries it out, unless that is to be done in order, and so is done."""
    kind = route[0]
    handler = _handlers.get(kind)
    request = IncomingCall(session, sender, route, content, frames)
    if handler is None:
        request.refuse(CallRefusedError(f"there is no request of kind {kind}"))
        return None
    if request.keeps:  # before the next message: that may pass the value on, or release it
        session.objects.hold(request.number, request.number, sender)
    if kind in _in_order:
        _guarded(handler, request)
        return None
    return functools.partial(_guarded, handler, request)


def _guarded(handler: Handler, request: IncomingCall) -> None:
    """Carry a request out; one that cannot be read is refused."""
    try:
        handler(request)
    except CallRefusedError as error:
        request.refuse(error)
