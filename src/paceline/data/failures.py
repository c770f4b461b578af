"""Carrying an exception out of a loading process, type, message and notes included.

torch would raise the same type with a text of its own, and a RuntimeError where the type's constructor takes
more than a message.
"""

from __future__ import annotations

import pickle
import traceback
from dataclasses import dataclass

from paceline.errors import PacelineError


@dataclass(frozen=True, slots=True)
class LoaderFailure:
    """An exception of a loading process, on its way to the training process."""

    pickled: bytes

    @classmethod
    def of(cls, error: Exception) -> LoaderFailure:
        """Pack an exception, with the traceback that pickling would lose as a note."""
        error.add_note(
            "Traceback in the loading process:\n" + "".join(traceback.format_tb(error.__traceback__))
        )
        attempts: tuple[object, ...] = (error, _Parts(type(error), error.args, dict(error.__dict__)))
        for attempt in attempts:
            try:
                pickled = pickle.dumps(attempt)
                pickle.loads(pickled)  # noqa: S301 - our own bytes, to see whether they come back
            except Exception:  # noqa: BLE001, S112 - if it cannot travel so, the next form is tried
                continue
            return cls(pickled)
        text = "".join(traceback.format_exception_only(error)).strip()
        lost = PacelineError(
            f"a loading process raised an exception that cannot travel between processes: {text}"
        )
        return cls(pickle.dumps(lost))

    def unpack(self) -> Exception:
        """Return the exception."""
        error: Exception | _Parts = pickle.loads(self.pickled)  # noqa: S301 - written by our own loading process
        return error.assemble() if isinstance(error, _Parts) else error


@dataclass(frozen=True, slots=True)
class _Parts:
    """An exception whose class cannot be called with its `args`, as many a class with its own __init__."""

    kind: type[Exception]
    arguments: tuple[object, ...]
    attributes: dict[str, object]

    def assemble(self) -> Exception:
        error = self.kind.__new__(self.kind, *self.arguments)
        error.__dict__.update(self.attributes)
        return error
