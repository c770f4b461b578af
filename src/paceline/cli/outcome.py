"""How a command ends: with its result for a person or a program, or with the first cause of a failure."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from paceline import documents
from paceline.errors import WorkerFailedError, in_one_line
from paceline.launch.base import Outcome
from paceline.launch.failures import WorkerFailure

if TYPE_CHECKING:
    from paceline.verify.report import Report


def report(outcome: Outcome) -> int:
    """Show what went wrong, if something did, and give the exit status."""
    failure = outcome.failure
    if outcome.interrupted is not None:
        _say(outcome.farewell)
    elif failure is not None and failure.kind in ("input", "disk"):
        _say(in_one_line(f"error: {failure.message}"))
    elif failure is not None and failure.kind == "hang":
        _say(f"\n{failure.message}")  # it says who and where by itself
    elif failure is not None:
        who = f"\nrank {failure.rank} on {failure.host} {failure.cause()}"
        _say(f"{who}:\n{failure.trace.rstrip()}" if failure.trace else f"{who.rstrip('.')}.")
    return outcome.status


def report_error(error: WorkerFailedError) -> int:
    """Show a failure of the user's own code as that of a run: its traceback, last."""
    failure = WorkerFailure(
        rank=error.rank, host=error.host, kind="code", message=error.cause, trace=error.trace
    )
    return report(Outcome(results=(), failure=failure))


def show_report(found: Report, *, as_json: bool) -> int:
    """Print what a check found, and return the exit status: 1 where it does not hold."""
    if as_json:
        print_json(found.as_json())
    else:
        from rich.console import Console

        # A sentence stays one line, to be searched for.
        Console(highlight=False).print(found.render(), soft_wrap=True)
    return 0 if found.holds else 1


def print_json(value: Any) -> None:
    """Print one JSON object as the last line of standard output."""
    sys.stdout.write(json.dumps(documents.plain(value), allow_nan=False) + "\n")
    sys.stdout.flush()


def _say(text: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(text + "\n")
