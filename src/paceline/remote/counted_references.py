"""References to values that stay on their worker, counted there: the last one that goes frees the value."""

from __future__ import annotations

import threading
import weakref
from typing import Any, Generic, TypeVar, cast

from paceline.errors import CallTimeoutError, InputError
from paceline.remote.exchange import FETCH, HOLD, RELEASE, SPOIL
from paceline.remote.failures import CallFailure, checked_timeout
from paceline.remote.gradients import active
from paceline.remote.incoming import IncomingCall, handles
from paceline.remote.object_store import Number, Token
from paceline.remote.session import Session, current
from paceline.transport.values import Writer

Value = TypeVar("Value")
_here: weakref.WeakSet[Reference[Any]] = weakref.WeakSet()
_lock = threading.RLock()
"""References are made and passed on by every thread that serves a call, also while one of them counts."""


class Reference(Generic[Value]):
    """A value on the worker that owns it."""

    def __init__(self, owner: str, number: Number, token: Token, what: str) -> None:
        self.owner = owner
        """The worker that has the value."""
        self._number, self._token, self._what = number, token, what
        self._session = current()
        with _lock:
            _here.add(self)

    @property
    def identity(self) -> str:
        """What tells this value apart from all others, on every worker."""
        return f"{self._number[0]}.{self._number[1]}"

    @property
    def what(self) -> str:
        """What made it, in words."""
        return self._what

    @property
    def number(self) -> Number:
        """What its owner knows it by."""
        return self._number

    def fetch(self, timeout: float | None = None) -> Value:
        """Bring a copy of the value here, or raise what the call that was to make it came to.

        On its owner it is the value itself, as of RRef.to_here: copy it there before it is written to.
        """
        session = self._checked()
        timeout_s = checked_timeout(timeout) or session.timeout_s
        if self.owner == session.name:
            return self._local(timeout_s)
        what, context = f"fetching {self._what}", active()
        session.check(self.owner, what)
        asked = session.exchange.request(
            self.owner, FETCH, self._number, what=what, timeout_s=timeout_s, context=context
        )
        return cast("Value", asked.wait())

    def local(self) -> Value:
        """Return the value itself, on the worker that owns it."""
        session = self._checked()
        if self.owner != session.name:
            raise InputError(
                f"{self._what} is on {self.owner}, not here. Bring a copy with fetch(), or work with it there."
            )
        return self._local(session.timeout_s)

    def _local(self, timeout_s: float) -> Value:
        try:
            value = self._session.objects.local(self._number, timeout_s)
        except TimeoutError:
            raise CallTimeoutError(
                f"{self._what} was not made within {timeout_s:g} s. Give fetch(timeout=...) more."
            ) from None
        if type(value) is CallFailure:
            raise value.exception()
        return cast("Value", value)

    def _checked(self) -> Session:
        """Return the session, if it is still the one that this reference is of."""
        session = current()
        if session is not self._session:
            raise InputError(f"the session in which {self._what} was made has ended, and the value with it.")
        return session

    def written(self, writer: Writer) -> list[Any]:
        """Return its form in a message: the worker that gets it is one more holder, of which the owner hears first."""
        session = self._checked()
        token = (session.rank, next(session.numbers))
        writer.notes.append((self.owner, (self._number, token)))
        return [self.owner, *self._number, *token, self._what]

    @classmethod
    def read(cls, payload: list[Any]) -> Reference[Any]:
        """Make a reference of what arrived."""
        owner, *numbers, what = payload
        first, second, third, fourth = map(int, numbers)
        return cls(str(owner), (first, second), (third, fourth), str(what))

    def __reduce__(self) -> tuple[Any, ...]:
        raise InputError(f"a reference travels only in a call or its answer, and {self!r} is in neither.")

    def __del__(self) -> None:
        """Let go."""
        if hasattr(self, "_session"):
            self._session.exchange.release(self.owner, (self._number, self._token))

    def __repr__(self) -> str:
        return f"<reference {self.identity} to {self._what} on {self.owner}>"


def reference(value: Value) -> Reference[Value]:
    """Return a reference to a value of this worker, for others to hold."""
    session = current()
    number = (session.rank, next(session.numbers))
    session.objects.hold(number, number, session.name)
    session.objects.put(number, value)
    return Reference(session.name, number, number, type(value).__name__)


def held_here() -> list[tuple[str, str, str]]:
    """Return identity, description and owner of all that this worker holds."""
    with _lock:
        held = list(_here)
    return sorted({(one.identity, one.what, one.owner) for one in held})


# The owner's side.


@handles(FETCH)
def _fetch(request: IncomingCall) -> None:
    """Send a value when it is there; no thread waits with it."""
    context = request.context()
    rank, count = request.read()
    request.session.objects.when_made((rank, count), lambda value: request.send(value, context))


@handles(HOLD, in_order=True)
def _hold(request: IncomingCall) -> None:
    """Count a holder that was passed a reference."""
    first, second, third, fourth, holder = request.read()
    request.session.objects.hold((first, second), (third, fourth), holder)


@handles(RELEASE, in_order=True)
def _release(request: IncomingCall) -> None:
    """Free what was held for the last time, on a thread of its own: with a value may go whatever it held."""
    told = request.read()
    holds = [((told[at], told[at + 1]), (told[at + 2], told[at + 3])) for at in range(0, len(told), 4)]
    freed = request.session.objects.release(holds)
    if freed:
        request.exchange.pool.submit(freed.clear)


@handles(SPOIL, in_order=True)
def _spoil(request: IncomingCall) -> None:
    """Hear from the worker that asked for a value that the call came to nothing, for whoever waits for it."""
    count, never_sent, state = request.read()
    number, objects = (request.number[0], count), request.session.objects
    if never_sent:
        objects.hold(number, number, request.caller)
    request.exchange.pool.submit(lambda: objects.spoil(number, CallFailure(*state)))
