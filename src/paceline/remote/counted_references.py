"""References to values that stay on their worker, counted there: the last one that goes frees the value."""

from __future__ import annotations

import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Generic, TypeVar, cast

from torch.distributed import rpc

from paceline.errors import CallTimeoutError, InputError, WorkerGoneError
from paceline.remote import kept
from paceline.remote.failures import Failure, translate
from paceline.remote.guard import own, refusal
from paceline.remote.kept import Hold, Number, Token
from paceline.remote.session import Session, current

Value = TypeVar("Value")
_here: weakref.WeakSet[Reference[Any]] = weakref.WeakSet()
_lock = threading.Lock()
"""References are made on every thread that serves a call, also while one of them counts."""
_GATHER_S = 0.002
"""How long an owner waits to be told, so that it is told of many at once."""
_sending = threading.local()
"""To which worker the message goes that this thread is writing."""


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
        self._returns = _returns(current())
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
        session = current()
        timeout_s = session.timeout_s if timeout is None else timeout
        if self.owner == session.name:
            return self._local(timeout_s)
        what = f"fetching {self._what}"
        session.check(self.owner, what)
        try:
            value = rpc.rpc_async(self.owner, kept.fetch, args=(self._number,), timeout=timeout_s).wait()
        except RuntimeError as error:
            raise _problem(session, error, self.owner, what, timeout_s) from None
        return cast("Value", _value(value))

    def local(self) -> Value:
        """Give the value itself, on the worker that owns it."""
        session = current()
        if self.owner != session.name:
            raise InputError(
                f"{self._what} is on {self.owner}, not here. Bring a copy with fetch(), or work with it there."
            )
        return self._local(session.timeout_s)

    def _local(self, timeout_s: float) -> Value:
        try:
            return cast("Value", _value(kept.local(self._number, timeout_s)))
        except TimeoutError:
            raise CallTimeoutError(
                f"{self._what} was not made within {timeout_s:g} s. Give fetch(timeout=...) more."
            ) from None

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel as a reference: the worker that gets it is one more holder, and the owner knows before this one lets go."""
        session = current()
        token, holder = (session.rank, next(session.numbers)), getattr(_sending, "to", "")
        if self.owner == session.name:
            kept.hold(self._number, token, holder)
        elif self.owner not in session.lost:
            self._unheard = [one for one in self._unheard if not one.done()]
            self._unheard.append(rpc.rpc_async(self.owner, kept.add, args=(self._number, token, holder)))
        return (rebuild, (self.owner, self._number, token, self._what))

    def __del__(self) -> None:
        """Let go; a finaliser must not wait for anybody, so another thread tells the owner."""
        if hasattr(self, "_returns"):
            self._returns.put((self.owner, (self._number, self._token), self._unheard))

    def __repr__(self) -> str:
        return f"<reference {self.identity} to {self._what} on {self.owner}>"


@own
def rebuild(owner: str, number: Number, token: Token, what: str) -> Reference[Any]:
    """Make a reference of what arrived."""
    return Reference(owner, number, token, what)


def reference(value: Value) -> Reference[Value]:
    """Give a reference to a value of this worker, for others to hold."""
    session = current()
    number, token = new_hold(session)
    kept.hold(number, token, session.name)
    kept.put(number, value)
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
    """Have a worker make a value and keep it: `keep` is called there with the hold, its holder and `args`."""
    session = current()
    number, token = new_hold(session)
    asked = send(owner, keep, (number, token, session.name, *args), timeout_s)

    def look(answer: Any) -> None:
        try:
            answer.wait()
        except RuntimeError as error:
            # Whoever waits for the value there is told: it may never have been asked for.
            problem = _problem(session, error, owner, what, timeout_s)
            with suppress(RuntimeError):
                rpc.rpc_async(owner, kept.spoil, args=(number, Failure.of(problem, session.name)))

    asked.add_done_callback(look)
    return Reference(owner, number, token, what, asked=asked, holds=holds)


def send(worker: str, run: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> Any:
    """Send a call; references in its arguments are that worker's from then on."""
    _sending.to = worker
    try:
        return rpc.rpc_async(worker, run, args=args, timeout=timeout_s)
    finally:
        _sending.to = ""


def new_hold(session: Session) -> Hold:
    """Give names for a new value and for the first hold on it."""
    return (session.rank, next(session.numbers)), (session.rank, next(session.numbers))


def let_go(owner: str, hold: Hold) -> None:
    """Let go of a hold that no reference stands for."""
    _returns(current()).put((owner, hold, []))


def held_here() -> list[tuple[str, str, str]]:
    """Give identity, description and owner of all that this worker holds."""
    with _lock:
        held = list(_here)
    return sorted({(one.identity, one.what, one.owner) for one in held})


def _value(value: Any) -> Any:
    if type(value) is Failure:
        raise value.exception()
    if (refused := refusal(value)) is not None:
        raise refused
    return value


def _problem(session: Session, error: RuntimeError, worker: str, what: str, timeout_s: float) -> Exception:
    found = translate(error, worker, what, timeout_s)
    if isinstance(found, WorkerGoneError):
        session.note_lost(worker)
    return found


Return = tuple[str, Hold, list[Any]]
"""An owner, what is let go of there, and what it must have heard before."""


class _Returns:
    """Tells owners what this worker has let go of, many at a time."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._queue: SimpleQueue[Return | None] = SimpleQueue()
        self.put = self._queue.put
        session.at_close(lambda: self._queue.put(None))
        threading.Thread(target=self._serve, daemon=True, name="paceline-references").start()

    def _serve(self) -> None:
        while (first := self._queue.get()) is not None:
            time.sleep(_GATHER_S)
            ready: dict[str, list[Hold]] = defaultdict(list)
            for one in [first, *self._waiting()]:
                if one is None:
                    return
                owner, hold, unheard = one
                late = next((call for call in unheard if not call.done()), None)
                if late is None:
                    ready[owner].append(hold)
                else:
                    late.add_done_callback(lambda _, one=one: self._queue.put(one))
            self._tell(ready)

    def _waiting(self) -> list[Return | None]:
        return [self._queue.get_nowait() for _ in range(self._queue.qsize())]  # nobody else takes any

    def _tell(self, ready: Mapping[str, list[Hold]]) -> None:
        for owner, holds in ready.items():
            if owner == self._session.name:
                kept.drop(holds)
            elif owner not in self._session.lost:
                with suppress(RuntimeError):  # it is gone, and all that it had with it
                    rpc.rpc_async(owner, kept.drop, args=(holds,))


_telling: tuple[Session, _Returns] | None = None


def _returns(session: Session) -> _Returns:
    global _telling  # noqa: PLW0603  (a session is one a process)
    with _lock:
        if _telling is None or _telling[0] is not session:
            _telling = session, _Returns(session)
        return _telling[1]
