"""What a verification found: one row a candidate, the diagnosis, and whether every promise holds. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

HOLDS = {
    "bitwise": ("bitwise",),
    "numeric": ("bitwise", "numeric"),
    "statistical": ("bitwise", "numeric", "diverged"),
}
"""Which levels found satisfy which level promised."""


def finite(number: float | None) -> float | None:
    """Give a number that JSON can hold; None for an infinite one."""
    return number if number is not None and math.isfinite(number) else None


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A cause with its evidence and its remedy."""

    probe: str
    cause: str
    evidence: str
    remedy: str
    harmless: bool = False
    """Whether it did no harm in this comparison: worth knowing, no reason to fail."""

    def lines(self) -> list[str]:
        """Say it for a person."""
        head = "Worth knowing" if self.harmless else "Cause"
        return [f"{head}: {self.cause}", f"  seen: {self.evidence}", f"  remedy: {self.remedy}"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """What became of one candidate."""

    strategy: str
    workers: int
    promised: str
    found: str
    """bitwise, numeric, diverged, failed, or skipped."""
    relative: float | None = None
    """The largest relative difference of gradient, weights and loss, where there is one."""
    lost: int = 0
    repeated: int = 0
    seconds: float = 0.0
    first: str = ""
    """Where it first parts from the reference, and by how much; or why it could not be run."""
    step: int | None = None

    @property
    def holds(self) -> bool:
        """Whether the promise holds; a pair that cannot be run breaks none."""
        if self.found == "skipped":
            return True
        return self.found in HOLDS.get(self.promised, ()) and not self.lost and not self.repeated


@dataclass(frozen=True, kw_only=True)
class Report:
    """The whole verification."""

    task: str
    steps: int
    shards: int
    loss: float
    """The reference's loss after the last step."""
    bound: float
    """The largest relative difference that a numeric promise allows at the end."""
    rows: list[Row]
    findings: list[Finding] = field(default_factory=list)
    ruled_out: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def holds(self) -> bool:
        """Whether every promise holds and nothing was found that would break one elsewhere."""
        return all(row.holds for row in self.rows) and all(finding.harmless for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """Give it as plain data."""
        return {
            "task": self.task,
            "steps": self.steps,
            "shards": self.shards,
            "loss": self.loss,
            "bound": self.bound,
            "holds": self.holds,
            "rows": [
                {**vars(row), "relative": finite(row.relative), "holds": row.holds} for row in self.rows
            ],
            "findings": [vars(finding) for finding in self.findings],
            "ruled_out": self.ruled_out,
            "unchecked": self.unchecked,
            "wall_s": round(self.seconds, 3),
        }
