"""An exception on its way from one worker to another, with the traceback of where it was raised."""

from __future__ import annotations

import traceback

from paceline.errors import CallTimeoutError, RemoteError, WorkerGoneError
from paceline.remote import registry
from paceline.remote.guard import own

_PLAIN = (str, int, float, bool, type(None))
_GONE = (
    "eof",
    "epipe",
    "econnre",
    "pipe closed",
    "connection",
    "enotconn",
    "etimedout",
    "ehostunreach",
    "ecanceled",
)
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
    def of(cls, error: Exception, worker: str) -> Failure:
        """Describe an exception so that any worker can read it."""
        plain = all(isinstance(value, _PLAIN) for value in error.args)
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
        made_by = registry.exception_type(self.address)
        try:
            error = made_by(*self.arguments) if made_by is not None else None
        except TypeError:
            error = None  # a constructor with arguments of its own
        name = self.address.rpartition(":")[2]
        made = error if isinstance(error, Exception) else RemoteError(f"{name} on {self.worker}: {self.text}")
        made.add_note(f"On {self.worker}:\n{self.trace.rstrip()}")
        return made


def translate(error: RuntimeError, worker: str, what: str, timeout_s: float) -> Exception:
    """Give what torch's transport said in our words; what it did not say of the transport stays as it is."""
    text = str(error)
    if _TIMED_OUT in text:
        return CallTimeoutError(
            f"{what} on {worker} gave no answer within {timeout_s:g} s. Give it more with .options(timeout=...)."
        )
    if any(word in text.lower() for word in _GONE):
        return gone(worker, what)
    return error


def gone(worker: str, what: str) -> WorkerGoneError:
    """Say that a worker cannot answer any more."""
    return WorkerGoneError(f"{what} failed: {worker} is gone. Call another worker, or start the run again.")
