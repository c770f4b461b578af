"""What a machine tells another of itself, and what of it must be alike on both. Imports no torch."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from paceline.doctor.finding import Finding, fail, warn
from paceline.doctor.versions import versions
from paceline.observe.formats import duration
from paceline.world import env

KIND = "paceline-doctor"
CLOCK_S = 2.0
"""Clocks that differ by less than this are taken to agree."""
MUST_AGREE = ("paceline", "torch")
"""What a machine is turned away for when it joins a run with another one."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """One machine."""

    name: str
    identifier: str
    """Made anew by each command, by which it knows its peers again."""
    port: int = 0
    """A free port of it, as workers use them; 0 where there is none."""
    clock: float = field(default_factory=time.time)
    versions: Mapping[str, str] = field(default_factory=versions)

    @classmethod
    def mine(cls, identifier: str, port: int = 0) -> Card:
        """Return that of this machine, now."""
        return cls(name=env.host(), identifier=identifier, port=port)

    def packed(self) -> bytes:
        """Return it as one line of JSON."""
        return json.dumps({"kind": KIND, **asdict(self)}).encode() + b"\n"

    @classmethod
    def read(cls, line: bytes) -> Card | None:
        """Return the card in a line that came from anybody; None where there is none in it."""
        try:
            told = json.loads(line)
        except ValueError:
            return None
        match told:
            case {
                "kind": str(kind),
                "name": str(name),
                "identifier": str(identifier),
                "port": int(port),
                "clock": float(clock),
                "versions": dict(known),
            } if kind == KIND and 0 <= port <= 65535:
                plain = {str(key)[:40]: str(value)[:40] for key, value in known.items()}
                return cls(name=name[:80], identifier=identifier[:80], port=port, clock=clock, versions=plain)
        return None


def compare(mine: Card, theirs: Card, name: str, ahead_s: float) -> list[Finding]:
    """Return what differs between this machine and another, whose clock is `ahead_s` before ours."""
    found = []
    for package in sorted(mine.versions.keys() | theirs.versions.keys()):
        here, there = mine.versions.get(package, "none"), theirs.versions.get(package, "none")
        if here == there:
            continue
        level = fail if package in MUST_AGREE else warn
        what = f"{package} is {here} here and {there} on {name}"
        why = (
            "One of them would be turned away. "
            if package in MUST_AGREE
            else "Results may differ in their last bits. "
        )
        found.append(level("versions", what, f"{why}Install the same on both."))
    if abs(ahead_s) > CLOCK_S:
        word = "ahead of" if ahead_s > 0 else "behind"
        found.append(
            warn(
                "clock",
                f"the clock of {name} is {duration(abs(ahead_s))} {word} this one",
                "Training does not mind; times in logs, events and file systems will not fit together. Start chrony or ntpd.",
                seconds=ahead_s,
            )
        )
    return found
