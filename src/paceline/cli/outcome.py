"""How a command ends: the result for a person or a program, or the first cause of a failure, last of all."""

from __future__ import annotations

import json
import sys
from typing import Any

from paceline.launch.base import Outcome


def report(outcome: Outcome) -> int:
    """Show what went wrong, if something did, and give the exit status."""
    failure = outcome.failure
    if outcome.interrupted is not None:
        _say("interrupted: all workers have ended.")
    elif failure is not None and failure.kind == "input":
        _say(f"error: {failure.message}")
    elif failure is not None:
        who = f"\nrank {failure.rank} on {failure.host} {failure.cause()}"
        _say(f"{who}:\n{failure.trace.rstrip()}" if failure.trace else f"{who.rstrip('.')}.")
    return outcome.status


def print_json(value: Any) -> None:
    """Print one JSON object as the last line of standard output."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def _say(text: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(text + "\n")
