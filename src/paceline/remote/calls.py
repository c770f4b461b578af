"""The side of a call that asks: waits for the answer, takes it later, or leaves it where it is."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any, Generic, ParamSpec, TypeVar, cast

from paceline.errors import CallRefusedError, CallTimeoutError, InputError, RemoteError
from paceline.remote import registry
from paceline.remote.counted_references import Reference
from paceline.remote.exchange import SPOIL
from paceline.remote.failures import CallFailure, checked_timeout
from paceline.remote.gradients import active
from paceline.remote.pending import PendingCall
from paceline.remote.session import Session, current

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class Future(Generic[Result]):
    """An answer that is on its way."""

    def __init__(self, call: PendingCall) -> None:
        self._call = call

    def done(self) -> bool:
        """Return whether the answer is there."""
        return self._call.done()

    def when_done(self, action: Callable[[], None]) -> None:
        """Have something done when the answer is there, or the call has failed: at once, if it is so already."""
        self._call.when_done(action)

    def wait(self) -> Result:
        """Return the answer when it is there, or raise what the call came to."""
        return cast("Result", self._call.wait())


def wait_all(futures: Iterable[Future[Result]]) -> list[Result]:
    """Return all answers, in the order of the calls; the first failure is raised when all have ended."""
    answers: list[Result] = []
    first: Exception | None = None
    for future in futures:
        try:
            answers.append(future.wait())
        except Exception as error:  # noqa: BLE001  (raised below, when nothing is in flight any more)
            first = first or error
    if first is not None:
        raise first
    return answers


class Method(Generic[Parameters, Result]):
    """Something that is called on another worker, which finds it by `kind` and `target`. `stays`: its value may stay there."""

    def __init__(
        self,
        worker: str,
        kind: int,
        target: tuple[Any, ...],
        described: Callable[..., Any],
        *,
        stays: bool = True,
        timeout_s: float | None = None,
        retries: int = 0,
        holds: object = None,
    ) -> None:
        self._worker, self._kind, self._target, self._stays = worker, kind, target, stays
        self._described, self._timeout_s, self._retries = described, timeout_s, retries
        self._holds = holds
        self._name = described.__qualname__
        functools.update_wrapper(self, described)

    def __call__(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        """Call it and wait for the answer."""
        for _ in range(self._retries):
            with contextlib.suppress(CallTimeoutError):
                return self._once(args, kwargs)
        return self._once(args, kwargs)

    def _once(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Result:
        return cast("Result", self._send(args, kwargs, waits=True).wait())

    def _send(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, keeps: bool = False, waits: bool = False
    ) -> PendingCall:
        session = current()
        context = active() if self._stays else None  # what is batched is computed for several at once
        session.check(self._worker, self._name)
        return session.exchange.request(
            self._worker,
            self._kind,
            [*self._target, args, kwargs],
            what=self._name,
            timeout_s=session.timeout_s if self._timeout_s is None else self._timeout_s,
            keeps=keeps,
            holds=self._holds,
            context=context,
            waits=waits,
        )

    def future(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Future[Result]:
        """Call it and give the answer that is on its way."""
        return Future(self._send(args, kwargs))

    def remote(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Reference[Result]:
        """Call it and leave the value there; what comes back is a reference to it."""
        if not self._stays:
            raise InputError(
                f"{self._name} is batched: its value goes to the caller. Use .future instead of .remote."
            )
        session = current()
        try:
            call = self._send(args, kwargs, keeps=True)
        except CallRefusedError as error:  # whoever wants the value is told
            count = next(session.numbers)
            _spoil(session, self._worker, count, error, never_sent=True)
        else:
            count = call.number
            call.when_done(lambda: _look(session, call))
        number = (session.rank, count)
        return Reference(self._worker, number, number, self._name)

    def options(self, *, timeout: float | None = None, retries: int = 0) -> Method[Parameters, Result]:
        """Return the same with a time-out in seconds of its own; only what is idempotent may be tried again."""
        if retries and not registry.is_idempotent(self._described):
            raise InputError(
                f"{self._name} may not be tried again: nobody knows whether a lost call was carried out. "
                "Put @remote.idempotent above it if a second time does no harm."
            )
        if not isinstance(retries, int) or retries < 0:
            raise InputError(f"retries is {retries!r}, but must be a whole number of at least 0.")
        return Method(
            self._worker,
            self._kind,
            self._target,
            self._described,
            stays=self._stays,
            timeout_s=checked_timeout(timeout),
            retries=retries,
            holds=self._holds,
        )

    def __repr__(self) -> str:
        return f"<{self._name} on {self._worker}>"


def method(bound: Callable[Parameters, Result]) -> Method[Parameters, Result]:
    """Return a service's method with its `.future`, `.remote` and `.options`, for a type checker: it is one already."""
    if not isinstance(bound, Method):
        raise InputError(f"{bound!r} is not a method of a remote service. Create one with remote.create.")
    return bound


def _look(session: Session, call: PendingCall) -> None:
    """Have whoever wants a value hear that the call which was to make it got no answer in time."""
    error = call.error
    if isinstance(error, CallTimeoutError):
        _spoil(session, call.worker, call.number, error)


def _spoil(
    session: Session, worker: str, count: int, error: RemoteError, *, never_sent: bool = False
) -> None:
    state = CallFailure.of(error, session.name).state()
    session.exchange.post(worker, SPOIL, [count, never_sent, state])
