"""How a worker failed: the first cause, and not what follows from it."""

from __future__ import annotations

import itertools
import os
import signal
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.errors import (
    DiskFaultError,
    InputError,
    LoadingProcessError,
    NonFiniteLossError,
    RecordsError,
    WorkerFailedError,
    WorkerGoneError,
)
from paceline.world.peer_failure_messages import names_a_lost_peer, text_of, writable

_PACKAGE = Path(__file__).resolve().parents[1]
_CALLERS = (
    *(str(_PACKAGE / folder) for folder in ("launch", "training", "strategies", "remote", "data")),
    "<frozen runpy",
)
"""Folders whose frames lie between a worker's start and the user's code in a traceback."""


_HINTS = {
    "Expected more than 1 value per channel when training": "A batch is computed in shards (and these in micro-batches, "
    "where micro_batch is given), one at a time, and BatchNorm got one sample. Choose batch size, shards and micro_batch so that "
    "every batch, the last one of the data too, has two samples for each of them.\n",
}
"""What torch's own words do not say, by what they are."""


@dataclass(frozen=True, kw_only=True)
class WorkerFailure:
    """How one worker failed."""

    rank: int
    host: str
    kind: str
    """input: the user's input is wrong; disk: the disk did not take what was written; code: the user's code raised;
    peer: it only lost its peers; signal, exit: the process ended without a word; few: too few workers are left;
    hang: it made no progress."""
    message: str
    trace: str = ""
    step: int | None = None
    """The step it happened in, where it is known."""
    between: bool = False
    """Whether it happened before that step was begun."""
    shards: tuple[int, ...] = ()
    """The shards of that step which ended another worker before, where they did."""

    @property
    def status(self) -> int:
        """Return the exit status that the command line ends with."""
        return 2 if self.kind == "input" else 1

    @property
    def of_code(self) -> bool:
        """Whether the user's own code failed, or ended the process before its part was done."""
        return self.kind in ("code", "exit")

    def cause(self) -> str:
        """Return in one clause what happened."""
        if self.kind in ("signal", "exit", "hang"):
            return self.message
        if self.kind == "peer" and self.trace:  # the fact alone: what the user could do, the launcher does
            return f"stopped: {next(iter(self.message.splitlines()), '').partition('. ')[0].rstrip('.')}"
        return "failed" if self.trace else f"stopped: {self.message}"

    def place(self) -> str:
        """Return in a few words where in the run it happened; empty where that is not known."""
        if self.step is None:
            return ""
        if not self.between:
            return f" in step {self.step}"
        return f" after step {self.step - 1}" if self.step else " before step 0"


def from_exception(
    error: BaseException, rank: int, host: str, step: int | None = None, *, between: bool = False
) -> WorkerFailure:
    """Describe an exception that ended a worker."""
    known = (
        ("disk", DiskFaultError | RecordsError),
        ("input", InputError),
        # Their words name step, shard and samples, or the process; where in our loop they were raised helps nobody.
        ("code", NonFiniteLossError | LoadingProcessError),
    )
    for kind, errors in known:
        if isinstance(error, errors):
            return WorkerFailure(rank=rank, host=host, kind=kind, message=text_of(error), step=step)
    if isinstance(error, WorkerFailedError) and error.rank != rank and not error.trace:
        # Where this one waited helps nobody.
        return WorkerFailure(rank=rank, host=host, kind="peer", message=text_of(error), step=step)
    if isinstance(error, WorkerFailedError) and isinstance(request := error.__cause__, SystemExit):
        trace = user_traceback(request)
        return WorkerFailure(rank=rank, host=host, kind="exit", message=error.cause, trace=trace, step=step)
    lost = isinstance(error, WorkerGoneError) or names_a_lost_peer(error)
    return WorkerFailure(
        rank=rank,
        host=host,
        kind="peer" if lost else "code",
        message=f"{type(error).__name__}: {text_of(error)}",
        trace=user_traceback(error),
        step=step,
        between=between,
    )


def from_status(status: int, rank: int, host: str, step: int | None = None) -> WorkerFailure:
    """Describe a worker that ended without saying why; one that ended well did so too early."""
    if status < 0:
        name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
        return WorkerFailure(rank=rank, host=host, kind="signal", message=f"was killed by {name}", step=step)
    early = "" if status else " before its part was done"
    message = f"exited with status {status}{early}"
    return WorkerFailure(rank=rank, host=host, kind="exit", message=message, step=step)


def follows(failure: WorkerFailure, rank: int, waited_s: float) -> WorkerFailure:
    """Return a failure for a lost peer with which rank of the script had ended well before it."""
    if failure.kind != "peer" or not failure.trace:
        return failure
    words = f"rank {rank} had ended with status 0, {waited_s:.1f} s before."
    return replace(failure, trace=f"{failure.trace.rstrip()}\n{words}\n")


def nobody_finished(host: str) -> WorkerFailure:
    """Describe a launch whose workers have all gone without a result."""
    return WorkerFailure(rank=0, host=host, kind="few", message="no worker came to the end of its part")


def user_traceback(error: BaseException) -> str:
    """Format an exception without our frames that lead to the user's code."""
    report = traceback.TracebackException.from_exception(error)
    # Only the frames that lead to the user's code: it may come back through ours further down.
    theirs = list(itertools.dropwhile(lambda frame: frame.filename.startswith(_CALLERS), report.stack))
    # Where our own call of torch failed there is no such code, and the way there is what matters.
    if theirs and f"{os.sep}torch{os.sep}" not in theirs[0].filename:
        report.stack = traceback.StackSummary.from_list(theirs)
    hint = next((hint for words, hint in _HINTS.items() if words in text_of(error)), "")
    return writable("".join(report.format()) + hint)


def first_cause(failures: Sequence[WorkerFailure]) -> WorkerFailure:
    """Pick the failure that began it: losing a peer is a consequence; among the rest the earliest seen wins."""
    order = {"few": 0, "hang": 0, "input": 0, "disk": 0, "code": 1, "signal": 1, "exit": 2, "peer": 3}
    return min(failures, key=lambda failure: order[failure.kind])
