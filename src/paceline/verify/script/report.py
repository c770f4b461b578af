"""What the verification of a script found, for a person and for a program. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.verify.report import Finding, Part, Report


@dataclass(frozen=True, kw_only=True)
class ScriptReport(Report):
    """Whether a script computes on several workers what it computes on one."""

    script: str
    workers: int
    steps: tuple[int, int]
    """Of one process, and of each of several."""
    found: str
    relative: float
    first: str
    """Where they first differ by more than rounding."""
    findings: list[Finding]
    observed: list[str]
    unobserved: list[str]
    seconds: float | None

    @property
    def holds(self) -> bool:
        """Whether nothing differs by more than rounding, and no fault was found."""
        return self.found != "diverged" and all(finding.harmless for finding in self.findings)

    def parts(self) -> Iterator[Part]:
        """Return the difference, its causes, and what could be observed."""
        one, many = self.steps
        runs = f"{self.workers} workers ({many} steps) against one process ({one} steps)"
        yield f"{self.script}: {runs}: {self.found}, largest relative difference {self.relative:.2g}"
        if self.first:
            yield f"first differs at {self.first}"
        for finding in self.findings:
            yield from finding.lines()
        if self.found == "diverged" and not self.findings:
            yield "No cause was found among what could be observed."
        yield from (f"observed: {text}" for text in self.observed)
        yield from (f"not observed: {text}" for text in self.unobserved)

    @property
    def verdict(self) -> str:
        """Whether several workers give the answer of one."""
        return (
            "the script computes what its one-process run computes" if self.holds else "NOT the same answer"
        )
