"""What a verification found: one row a candidate, the diagnosis, and whether every promise holds. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

HOLDS = {
    "bitwise": ("bitwise",),
    "numeric": ("bitwise", "numeric"),
    "statistical": ("bitwise", "numeric", "statistical"),
}
"""Which levels found satisfy which level promised."""


def finite(number: float | None) -> float | None:
    """Return a number that JSON can hold; None for an infinite one."""
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
        """Return it as text for a person."""
        head = "Worth knowing" if self.harmless else "Cause"
        return [f"{head}: {self.cause}", f"  seen: {self.evidence}", f"  remedy: {self.remedy}"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """What became of one candidate."""

    strategy: str
    workers: int
    promised: str
    found: str
    """bitwise, numeric, statistical (its loss curve is in the band), diverged, failed, refused (in one line, so nothing
    could differ), unverified, or skipped."""
    relative: float | None = None
    """The largest relative difference of gradient, weights and loss, where there is one."""
    lost: int = 0
    repeated: int = 0
    seconds: float = 0.0
    first: str = ""
    """Where it first parts from the reference, and by how much; or why it could not be run."""
    step: int | None = None
    shards: int = 0
    band: str = ""
    """For a statistical promise: what its loss curve was held to, and what it came to."""
    operation: str = ""
    """The first operation that differs, where no cause was found."""

    @property
    def holds(self) -> bool:
        """Whether the promise holds; a pair that cannot be run breaks none."""
        if self.found == "skipped":
            return True
        return self.found in HOLDS.get(self.promised, ()) and not self.lost and not self.repeated


@dataclass(frozen=True, kw_only=True)
class Resume:
    """A run that was saved in the middle and resumed otherwise, against one that was not."""

    saved_by: str
    resumed_by: str
    shards: int
    step: int
    promised: str
    found: str
    first: str = ""

    @property
    def holds(self) -> bool:
        """Whether what came of it is what both promise."""
        return self.found in HOLDS.get(self.promised, ())

    def line(self) -> str:
        """Return it as text for a person."""
        told = f"saved by {self.saved_by} after {self.step} steps, resumed by {self.resumed_by}: {self.found}"
        return told if self.holds else f"{told}; {self.first}"


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
    shard_counts: tuple[int, ...] = ()
    """All numbers of shards that were verified with; `shards` is the first."""
    resumes: list[Resume] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    ruled_out: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def holds(self) -> bool:
        """Whether every promise holds and nothing was found that would break one elsewhere."""
        kept = all(row.holds for row in self.rows) and all(one.holds for one in self.resumes)
        return kept and all(finding.harmless for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "task": self.task,
            "steps": self.steps,
            "shards": self.shards,
            "shard_counts": list(self.shard_counts or (self.shards,)),
            "loss": self.loss,
            "bound": self.bound,
            "holds": self.holds,
            "rows": [
                {**vars(row), "relative": finite(row.relative), "holds": row.holds} for row in self.rows
            ],
            "resumes": [{**vars(one), "holds": one.holds} for one in self.resumes],
            "findings": [vars(finding) for finding in self.findings],
            "ruled_out": self.ruled_out,
            "unchecked": self.unchecked,
            "wall_s": round(self.seconds, 3),
        }
