"""What a check found: a fact, whether it stands in the way of training, and the remedy. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Level(StrEnum):
    """How much a finding matters."""

    OK = "ok"
    WARN = "warn"
    """Training can start, but something will be slow, or fail later or elsewhere."""
    FAIL = "fail"
    """Training cannot start."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One fact about a machine."""

    check: str
    """What was looked at: one word, such as network."""
    level: Level
    what: str
    remedy: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """The numbers behind it, for a program."""
    machine: str = ""
    """Where it was found, in a job of several machines."""


def ok(check: str, what: str, **facts: Any) -> Finding:
    """Return a fact that is as it should be."""
    return Finding(check=check, level=Level.OK, what=what, facts=facts)


def warn(check: str, what: str, remedy: str, **facts: Any) -> Finding:
    """Return a fact that training can start with, but that will cost something."""
    return Finding(check=check, level=Level.WARN, what=what, remedy=remedy, facts=facts)


def fail(check: str, what: str, remedy: str, **facts: Any) -> Finding:
    """Return a fact that keeps training from starting."""
    return Finding(check=check, level=Level.FAIL, what=what, remedy=remedy, facts=facts)


def attempt(name: str, check: Callable[[], list[Finding]]) -> list[Finding]:
    """Return what a check finds; one that fails by itself, on a machine that it was not written for, says so."""
    try:
        return check()
    except Exception as error:  # noqa: BLE001  (whatever it is: the other checks go on)
        what = f"this could not be checked: {type(error).__name__}: {error}"
        return [warn(name, what, "Nothing need be wrong. The other checks do not depend on it.")]
