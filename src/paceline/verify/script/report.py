"""What the verification of a script found, for a person and for a program. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from paceline.verify.report import Finding, finite


@dataclass(frozen=True, kw_only=True)
class ScriptReport:
    """Whether a script computes on several workers what it computes on one."""

    script: str
    workers: int
    steps: tuple[int, int]
    """Of one process, and of each of several."""
    found: str
    relative: float
    first: str
    """Where they first part by more than rounding."""
    findings: list[Finding]
    observed: list[str]
    unobserved: list[str]
    seconds: float

    @property
    def holds(self) -> bool:
        """Whether nothing parted by more than rounding, and no fault was found."""
        return self.found != "diverged" and all(finding.harmless for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        plain = {**vars(self), "steps": list(self.steps), "findings": [vars(one) for one in self.findings]}
        plain["relative"] = finite(self.relative)
        return {**plain, "holds": self.holds, "wall_s": round(plain.pop("seconds"), 3)}

    def render(self) -> RenderableType:
        """Lay it out."""
        one, many = self.steps
        runs = f"{self.workers} workers ({many} steps) against one process ({one} steps)"
        lines = [f"{self.script}: {runs}: {self.found}, largest relative difference {self.relative:.2g}"]
        lines += [f"first differs at {self.first}"] if self.first else []
        for finding in self.findings:
            lines += finding.lines()
        if self.found == "diverged" and not self.findings:
            lines.append("No cause was found among what could be observed.")
        lines += [f"observed: {text}" for text in self.observed]
        lines += [f"not observed: {text}" for text in self.unobserved]
        verdict = (
            "the script computes what its one-process run computes" if self.holds else "NOT the same answer"
        )
        parts: list[RenderableType] = [Text(line) for line in lines]
        style = "bold green" if self.holds else "bold red"
        return Group(*parts, Text(f"{verdict} ({self.seconds:.1f} s)", style=style))
