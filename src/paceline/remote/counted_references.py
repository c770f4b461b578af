"""References to values that stay on their worker, counted there: the last one that goes frees the value."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar, cast

from torch.distributed import rpc

from paceline.errors import CallRefusedError, CallTimeoutError, InputError, WorkerGoneError
from paceline.remote import object_store
from paceline.remote.failures import Failure, translate
from paceline.remote.guard import own, refusal
from paceline.remote.message_recipient import begin, end, written
from paceline.remote.object_store import Hold, Number, Token
from paceline.remote.reference_releaser import Return, returns
from paceline.remote.session import Session, current

Value = TypeVar("Value")
_here: weakref.WeakSet[Reference[Any]] = weakref.WeakSet()
_lock = threading.RLock()
"""References are made and passed on by every thread that serves a call, also while one of them counts."""


class Reference(Generic[Value]):
    """A value on the worker that owns it."""

    def __init__(
        self,
        owner: str,
        number: Number,
        token: Token,
        what: str,
        *,
        asked: Any = None,
        holds: object = None,
    ) -> None:
        """`asked` is the call that makes the value, and `holds` what must live on until it has begun."""
        self.owner = owner
        """The worker that has the value."""
        self._number, self._token, self._what, self._holds = number, token, what, holds
        self._unheard = [] if asked is None else [asked]
        """What the owner must have heard before it hears that this one is let go of."""
        self._session = current()
        self._returns = returns(self._session)
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

    def fetch(self, timeout: float | None = None) -> Value:
        """Bring the value here, or raise what the call that was to make it came to."""
        session = self._checked()
        timeout_s = session.timeout_s if timeout is None else timeout
        if self.owner == session.name:
            return self._local(timeout_s)
        what = f"fetching {self._what}"
        session.check(self.owner, what)
        wanted = (self._number, session.name)
        try:
            value = rpc.rpc_async(self.owner, object_store.fetch, args=wanted, timeout=timeout_s).wait()
        except RuntimeError as error:
            raise problem(session, error, self.owner, what, timeout_s) from None
        return cast("Value", taken(value))

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
            value = object_store.local(self._number, timeout_s)
        except TimeoutError:
            raise CallTimeoutError(
                f"{self._what} was not made within {timeout_s:g} s. Give fetch(timeout=...) more."
            ) from None
        return cast("Value", taken(value))

    def _checked(self) -> Session:
        """Return the session, if it is still the one that this reference is of."""
        session = current()
        if session is not self._session:
            raise InputError(f"the session in which {self._what} was made has ended, and the value with it.")
        return session

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel as a reference: the worker that gets it is one more holder, and the owner knows before this one lets go."""
        session, (holder, given) = self._checked(), written()
        if not holder:
            raise InputError(f"a reference travels only in a call or its answer, and {self!r} is in neither.")
        token = (session.rank, next(session.numbers))
        unheard = []
        if self.owner == session.name:
            object_store.hold(self._number, token, holder)
        elif self.owner not in session.lost:
            unheard = [rpc.rpc_async(self.owner, object_store.add, args=(self._number, token, holder))]
            with _lock:
                self._unheard = [one for one in self._unheard if not one.done()] + unheard
        if given is not None:
            given.append((self.owner, (self._number, token), unheard, None))
        return (rebuild, (self.owner, self._number, token, self._what))

    def __del__(self) -> None:
        """Let go; a finaliser must not wait for anybody, so another thread tells the owner."""
        if hasattr(self, "_returns"):
            self._returns.put((self.owner, (self._number, self._token), self._unheard, self._holds))

    def __repr__(self) -> str:
        return f"<reference {self.identity} to {self._what} on {self.owner}>"


@own
def rebuild(owner: str, number: Number, token: Token, what: str) -> Reference[Any]:
    """Make a reference of what arrived."""
    return Reference(owner, number, token, what)


def reference(value: Value) -> Reference[Value]:
    """Return a reference to a value of this worker, for others to hold."""
    session = current()
    number, token = new_hold(session)
    object_store.hold(number, token, session.name)
    object_store.put(number, value)
    return Reference(session.name, number, token, type(value).__name__)


def ask(
    owner: str,
    what: str,
    keep: Callable[..., None],
    args: tuple[Any, ...],
    *,
    timeout_s: float,
    holds: object,
) -> Reference[Any]:
    """Have a worker make a value and keep it: `keep` is called there with the hold and `args`."""
    session = current()
    number, token = new_hold(session)
    asked = send(session, owner, keep, (number, token, *args), timeout_s)

    def look(answer: Any) -> None:
        try:
            answer.wait()
        except RuntimeError as error:
            found = problem(session, error, owner, what, timeout_s)
            held = None if isinstance(found, CallTimeoutError) else (token, session.name)
            with suppress(RuntimeError):
                rpc.rpc_async(owner, object_store.spoil, args=(number, Failure.of(found, session.name), held))

    asked.add_done_callback(look)
    return Reference(owner, number, token, what, asked=asked, holds=holds)


def send(
    session: Session, worker: str, run: Callable[..., Any], args: tuple[Any, ...], timeout_s: float
) -> Any:
    """Call `run` on a worker, which is told who calls; references in the arguments are that worker's from then on."""
    given: list[Return] = []
    before = begin(worker, given)
    try:
        answer = rpc.rpc_async(worker, run, args=(session.rank, *args), timeout=timeout_s)
    except BaseException:
        _take_back(session, given)
        raise
    finally:
        end(before)
    if given:
        answer.add_done_callback(functools.partial(_look_for_refusal, session, worker, given))
    return answer


def new_hold(session: Session) -> Hold:
    """Return names for a new value and for the first hold on it."""
    return (session.rank, next(session.numbers)), (session.rank, next(session.numbers))


def release(owner: str, hold: Hold) -> None:
    """Let go of a hold that no reference stands for."""
    _take_back(current(), [(owner, hold, [], None)])


def held_here() -> list[tuple[str, str, str]]:
    """Return identity, description and owner of all that this worker holds."""
    with _lock:
        held = list(_here)
    return sorted({(one.identity, one.what, one.owner) for one in held})


def _look_for_refusal(session: Session, worker: str, given: list[Return], answer: Any) -> None:
    """Take back what a message handed over that the other worker did not read."""
    try:
        answer.wait()
    except RuntimeError as error:
        if isinstance(translate(error, worker, "", 0.0), CallRefusedError):
            _take_back(session, given)


def _take_back(session: Session, given: list[Return]) -> None:
    for one in given:
        returns(session).put(one)


def taken(value: Any) -> Any:
    """Return the value of an answer, or raise what the call came to instead."""
    if type(value) is Failure:
        raise value.exception()
    if (refused := refusal(value)) is not None:
        raise refused
    return value


def problem(session: Session, error: RuntimeError, worker: str, what: str, timeout_s: float) -> Exception:
    """Return what torch said of a call in our words; a worker that it says is gone is known to be from then on."""
    found = translate(error, worker, what, timeout_s)
    if isinstance(found, WorkerGoneError):
        session.note_lost(worker)
    return found
