"""An exception on its way from one worker to another, with the traceback of where it was raised."""

from __future__ import annotations

import contextlib
import functools
import re
import traceback

from paceline.errors import CallRefusedError, CallTimeoutError, RemoteError, WorkerGoneError
from paceline.remote import registry
from paceline.remote.guard import UNREGISTERED, UNSEALED, own

_PLAIN = (str, int, float, bool, type(None))
_GONE = re.compile(
    r"\b(eof|epipe|econnre|pipe closed|connection|enotconn|etimedout|ehostunreach|ecanceled)", re.IGNORECASE
)
_OF_PYTHON = "\n\nAt:\n"
"""Stands before the stack where torch hands on an exception of Python's that came up while it read or wrote a message."""
_TIMED_OUT = "RPC ran for more than set timeout"


@own
class Failure:
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
    def of(cls, error: BaseException, worker: str) -> Failure:
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

    def exception(self) -> Exception:
        """Make the exception again: of its own type where that is known here, with the remote traceback as a note."""
        made = self._made_again()
        if made is None:
            name = self.address.rpartition(":")[2]
            made = RemoteError(f"{name} on {self.worker}: {self.text}")
        made.add_note(f"On {self.worker}:\n{self.trace.rstrip()}")
        return made

    def _made_again(self) -> Exception | None:
        """Make it of its arguments; a constructor that takes others, and makes its own words of them, is passed by."""
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


def translate(error: RuntimeError, worker: str, what: str, timeout_s: float) -> Exception:
    """Return what torch's transport said in our words; what it did not say of the transport stays as it is."""
    text = str(error)
    if _TIMED_OUT in text:
        return CallTimeoutError(
            f"{what} on {worker} gave no answer within {timeout_s:g} s. Give it more with .options(timeout=...)."
        )
    if (refused := re.search(rf"\S+ {UNREGISTERED}|{UNSEALED}", text)) is not None:
        return CallRefusedError(f"{what} on {worker} was refused: {refused[0]}.")
    said, of_python, _ = text.partition(_OF_PYTHON)
    if of_python:
        return RemoteError(
            f"{what} on {worker} came to nothing, because a value could not be sent: {said}. "
            "Give and return plain values, tensors, and classes with @remote.allow."
        )
    if _GONE.search(said.partition("Traceback")[0]):
        return gone(worker, what)
    return error


def gone(worker: str, what: str) -> WorkerGoneError:
    """Return the error that a worker cannot answer any more."""
    return WorkerGoneError(f"{what} failed: {worker} is gone. Call another worker, or start the run again.")
