"""The side of a call that asks: waits for the answer, takes it later, or leaves it where it is."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any, Generic, ParamSpec, TypeVar, cast

from paceline.errors import CallTimeoutError, InputError
from paceline.remote import dispatch, registry
from paceline.remote.counted_references import Reference, ask, problem, send, taken
from paceline.remote.session import Session, current

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class Future(Generic[Result]):
    """An answer that is on its way."""

    def __init__(
        self, session: Session, answer: Any, worker: str, what: str, timeout_s: float, holds: object = None
    ) -> None:
        self._session, self._answer, self._holds = session, answer, holds
        self._worker, self._what, self._timeout_s = worker, what, timeout_s

    def __del__(self) -> None:
        """Keep what the call needs until it has been made, also where nobody waits for its answer."""
        held = self._holds
        if held is not None and not self._answer.done():
            self._answer.add_done_callback(lambda _: held)

    def done(self) -> bool:
        """Return whether the answer is there."""
        return bool(self._answer.done())

    def when_done(self, action: Callable[[], None]) -> None:
        """Have something done when the answer is there, or the call has failed: at once, if it is so already."""
        self._answer.add_done_callback(lambda _: action())

    def wait(self) -> Result:
        """Return the answer when it is there, or raise what the call came to."""
        try:
            value = self._answer.wait()
        except RuntimeError as error:
            raise problem(self._session, error, self._worker, self._what, self._timeout_s) from None
        return cast("Result", taken(value))


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
    """Something that is called on another worker: `run` there finds it by `target`. `stays`: its value may stay there."""

    def __init__(
        self,
        worker: str,
        run: Callable[..., Any],
        target: tuple[Any, ...],
        described: Callable[..., Any],
        *,
        stays: bool = True,
        timeout_s: float | None = None,
        retries: int = 0,
        holds: object = None,
    ) -> None:
        self._worker, self._run, self._target, self._stays = worker, run, target, stays
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
        """Wait at once: whatever Python does in between keeps torch's threads from their work."""
        session, timeout_s = self._ready()
        try:
            value = send(session, self._worker, self._run, (*self._target, args, kwargs), timeout_s).wait()
        except RuntimeError as error:
            raise problem(session, error, self._worker, self._name, timeout_s) from None
        return cast("Result", taken(value))

    def _ready(self) -> tuple[Session, float]:
        """Return the session and how long to wait; a worker that is gone is not called."""
        session = current()
        session.check(self._worker, self._name)
        return session, session.timeout_s if self._timeout_s is None else self._timeout_s

    def future(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Future[Result]:
        """Call it and give the answer that is on its way."""
        session, timeout_s = self._ready()
        try:
            answer = send(session, self._worker, self._run, (*self._target, args, kwargs), timeout_s)
        except RuntimeError as error:
            raise problem(session, error, self._worker, self._name, timeout_s) from None
        return Future(session, answer, self._worker, self._name, timeout_s, self._holds)

    def remote(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Reference[Result]:
        """Call it and leave the value there; what comes back is a reference to it."""
        if not self._stays:
            raise InputError(
                f"{self._name} is batched: its value goes to the caller. Use .future instead of .remote."
            )
        session, timeout_s = self._ready()
        wanted = (self._run, (*self._target, args, kwargs))
        try:
            return ask(
                self._worker, self._name, dispatch.keep, wanted, timeout_s=timeout_s, holds=self._holds
            )
        except RuntimeError as error:
            raise problem(session, error, self._worker, self._name, timeout_s) from None

    def options(self, *, timeout: float | None = None, retries: int = 0) -> Method[Parameters, Result]:
        """Return the same with a time-out in seconds of its own; only what is idempotent may be tried again."""
        if retries and not registry.is_idempotent(self._described):
            raise InputError(
                f"{self._name} may not be tried again: nobody knows whether a lost call was carried out. "
                "Put @remote.idempotent above it if a second time does no harm."
            )
        if (timeout is not None and timeout <= 0) or retries < 0:
            raise InputError(
                f"timeout={timeout} and retries={retries}: give a time above 0, and 0 or more retries."
            )
        return Method(
            self._worker,
            self._run,
            self._target,
            self._described,
            stays=self._stays,
            timeout_s=timeout,
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
