"""Every exception paceline raises on purpose, as one tree.

    PacelineError
    ├── InputError              the user's input is wrong: one line, exit status 2
    │   ├── UnknownNameError    a name nobody knows, with the nearest one that exists
    │   └── CheckpointError     a checkpoint that cannot serve this run
    │       └── DiskFaultError  one that the disk did not take; a run in progress can go on without it. Exit status 1
    ├── RecordsError            the disk did not take the ledger, without which a run cannot go on, or the receipt
    ├── WorkerFailedError       a worker died; carries rank, host and its own traceback
    ├── NonFiniteLossError      the loss became NaN or infinite; names step, shard and samples
    ├── LoadingProcessError     a loading process died; names it and the signal
    ├── CollectiveMismatchError ranks disagree about the collective they are in
    └── RemoteError             a call to another worker came to nothing
        ├── WorkerGoneError     the worker that was called is dead
        ├── CallTimeoutError    no answer came in time
        └── CallRefusedError    something that is not registered, or without the run's secret

Each message gives the fact, the cause, and what to do next.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


class PacelineError(Exception):
    """The base of every exception that paceline raises on purpose."""

    exit_status = 1


class InputError(PacelineError):
    """What the user gave cannot work; the message is one line that says what would."""

    exit_status = 2


class UnknownNameError(InputError):
    """A name that is not in a table of names."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        names = sorted(known)
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        super().__init__(f"unknown {kind} {name!r}. {hint}Known: {', '.join(names)}.")

    def __reduce__(self) -> tuple[object, ...]:
        """Travel between processes as the finished message, not as constructor arguments."""
        return (InputError, (str(self),))


class CheckpointError(InputError):
    """A checkpoint is missing, damaged, or belongs to another model."""


class DiskFaultError(CheckpointError):
    """The disk did not take a checkpoint: it is full, read-only or gone. What was saved before is intact."""

    exit_status = 1


class RecordsError(PacelineError):
    """The disk did not take what a run keeps of itself beside its checkpoints."""


class WorkerFailedError(PacelineError):
    """A worker ended before its work did."""

    def __init__(self, rank: int, host: str, cause: str, trace: str = "") -> None:
        super().__init__(f"rank {rank} on {host} {cause}")
        self.rank, self.host, self.cause, self.trace = rank, host, cause, trace
        if trace:
            self.add_note(trace.rstrip())


class NonFiniteLossError(PacelineError):
    """The loss of a step is NaN or infinite, so the run stops before the weights are touched."""


class LoadingProcessError(PacelineError):
    """A process that loads data for a worker ended before the worker did."""


class CollectiveMismatchError(PacelineError):
    """Ranks called different collectives, or the same one with arguments that do not fit together."""


class RemoteError(PacelineError):
    """A call to another worker came to nothing; an exception raised there arrives as itself wherever its type is known."""


class WorkerGoneError(RemoteError):
    """The worker that was called, or that owns what a reference stands for, is gone."""


class CallTimeoutError(RemoteError):
    """No answer came in time; whether the call was carried out is not known."""


class CallRefusedError(RemoteError):
    """A call named what is not registered, or did not carry the run's secret."""


def in_one_line(text: str) -> str:
    """Return an error's words for a terminal, with the control characters of what they quote spelled out."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f]", lambda found: repr(found[0])[1:-1], text)
