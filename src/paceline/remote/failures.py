"""An exception on its way from one worker to another, with the traceback of where it was raised."""

from __future__ import annotations

import contextlib
import functools
import traceback
from numbers import Real
from typing import Any

from paceline.errors import CallTimeoutError, InputError, RemoteError, WorkerGoneError
from paceline.remote import registry

_PLAIN = (str, int, float, bool, type(None))


class CallFailure:
    """What a call came to on its worker instead of a value."""

    def __init__(
        self, worker: str, address: str, arguments: tuple[object, ...], text: str, trace: str
    ) -> None:
        self.worker, self.address, self.arguments, self.text, self.trace = (
            worker,
            address,
            arguments,
            text,
            trace,
        )

    @classmethod
    def of(cls, error: BaseException, worker: str) -> CallFailure:
        """Describe an exception so that any worker can read it."""
        plain = all(type(value) in _PLAIN for value in error.args)
        trace = "".join(traceback.format_exception(error))
        return cls(
            worker,
            registry.address_of(type(error)),
            error.args if plain else (str(error),),
            str(error),
            trace,
        )

    def state(self) -> list[Any]:
        """Return what a message says of it, in plain values."""
        return [self.worker, self.address, self.arguments, self.text, self.trace]

    def exception(self) -> Exception:
        """Make the exception again: of its own type where that is known here, with the remote traceback as a note."""
        made = self._made_again()
        if made is None:
            name = self.address.rpartition(":")[2]
            made = RemoteError(f"{name} on {self.worker}: {self.text}")
        made.add_note(f"On {self.worker}:\n{self.trace.rstrip()}")
        return made

    def _made_again(self) -> Exception | None:
        """Rebuild from the arguments; if the constructor has another signature, use `__new__`."""
        made_by = registry.exception_type(self.address)
        if made_by is None:
            return None
        made: list[Exception] = []
        for make in (made_by, functools.partial(made_by.__new__, made_by)):
            with contextlib.suppress(Exception):  # the next way, or a RemoteError that says it all
                made.append(make(*self.arguments))
                if str(made[-1]) == self.text:
                    return made[-1]
        return made[0] if made else None


def gone(worker: str, what: str) -> WorkerGoneError:
    """Return the error that a worker cannot answer any more."""
    return WorkerGoneError(f"{what} failed: {worker} is gone. Call another worker, or start the run again.")


def late(worker: str, what: str, timeout_s: float) -> CallTimeoutError:
    """Return the error that no answer came in time."""
    return CallTimeoutError(
        f"{what} on {worker} gave no answer within {timeout_s:g} s. Give it more with .options(timeout=...)."
    )


def checked_timeout(timeout: float | None) -> float | None:
    """Return a time-out in seconds, as a call was given it; raise InputError for what is none."""
    if timeout is not None and not (isinstance(timeout, Real) and timeout > 0):
        raise InputError(f"timeout is {timeout!r}, but must be a number of seconds above 0.")
    return timeout


def unsendable(worker: str, what: str, cause: str) -> RemoteError:
    """Return the error that a value has no form on the wire."""
    return RemoteError(
        f"{what} on {worker} came to nothing, because a value could not be sent: {cause}. "
        "Give and return plain values, tensors, and classes with @remote.allow."
    )
