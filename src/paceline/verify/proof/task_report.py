"""What the verification of a task found: a row for each candidate, the causes, the verdict. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rich.text import Text

from paceline.verify.report import Finding, Part, Report, columns

HOLDS = {
    "bitwise": ("bitwise",),
    "numeric": ("bitwise", "numeric"),
    "statistical": ("bitwise", "numeric", "statistical"),
}
"""Which levels found satisfy which level promised."""


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
    """Where it first differs from the reference, and by how much; or why it could not be run."""
    step: int | None = None
    shards: int = 0
    band: str = ""
    """For a statistical promise: what its loss curve was held to, and what it came to."""
    operation: str = ""
    """The first operation that differs, where no cause was found."""

    @property
    def holds(self) -> bool:
        """Whether the promised exactness holds; a pair that cannot be run does not break it."""
        if self.found == "skipped":
            return True
        return self.found in HOLDS.get(self.promised, ()) and not self.lost and not self.repeated


@dataclass(frozen=True, kw_only=True)
class Resume:
    """A run that was saved and resumed with another strategy or number of workers, against an uninterrupted one."""

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


@dataclass(frozen=True, kw_only=True, repr=False)
class TaskReport(Report):
    """The whole verification."""

    __repr__ = Report.__str__  # at a prompt it is the table

    task: str
    steps: int
    shard_counts: tuple[int, ...]
    """All numbers of shards that were verified with."""
    loss: float
    """The reference's loss after the last step."""
    bound: float
    """The largest relative difference that a numeric promise allows at the end."""
    rows: list[Row]
    resumes: list[Resume] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    ruled_out: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    seconds: float | None = 0.0

    @property
    def shards(self) -> int:
        """The default number of shards of a row: the first one asked for."""
        return self.shard_counts[0]

    @property
    def holds(self) -> bool:
        """Whether every promise holds and nothing was found that would break one elsewhere."""
        return not self._unmet and self._harmless

    def as_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        told = super().as_json()
        judged: list[Row | Resume] = [*self.rows, *self.resumes]
        for plain, one in zip([*told["rows"], *told["resumes"]], judged, strict=True):
            plain["holds"] = one.holds
        return {**told, "shards": self.shards}

    def parts(self) -> Iterator[Part]:
        """Return one table, then the first difference, the causes, and what was ruled out."""
        counts = " and ".join(map(str, self.shard_counts))
        yield Text.assemble(
            (self.task, "bold"),
            f": {self.steps} steps, {counts} shards, against one process (loss {self.loss:.6g} at the end)",
        )
        table = columns(
            ("strategy", "workers", "shards", "promised", "found", "lost", "repeated"),
            left=("strategy", "promised", "found"),
            wraps=("found",),
        )
        for row in self.rows:
            table.add_row(*_cells(row))
        yield table
        yield from dict.fromkeys(line for row in self.rows for line in _about(row, self.shards))
        for one in self.resumes:
            yield Text(one.line(), style="" if one.holds else "red")
        if any(row.found == "numeric" or row.promised == "numeric" for row in self.rows):
            yield Text(
                f"numeric: a relative difference of at most {self.bound:.3g} after the last step", style="dim"
            )
        for finding in self.findings:
            yield from finding.lines()
        if self._unmet - {"refused"} and self._harmless:
            yield "No cause is confirmed. Ruled out:"
            yield from (f"  {name}" for name in self.ruled_out)
        yield from (Text(f"not checked: {what}", style="dim") for what in self.unchecked)

    @property
    def verdict(self) -> str:
        """Whether every promise holds; of statistical ones, what was compared."""
        if self.holds:
            return self._held
        if self._unmet and self._unmet <= {"unverified", "refused"} and self._harmless:
            return "NOT verified"
        return "NOT the same answer" if self._unmet else "the answer depends on how it is computed"

    @property
    def _held(self) -> str:
        judged = [row for row in self.rows if row.found != "skipped"]
        loose = [row for row in judged if row.promised == "statistical"]
        if not loose:
            return "every promise holds"
        told = ["bitwise and numeric promises hold"] if len(loose) < len(judged) else []
        for found in dict.fromkeys(row.found for row in loose):
            names = ", ".join(dict.fromkeys(row.strategy for row in loose if row.found == found))
            told.append(
                f"{names}: compared by the loss curve alone, not verified to the bit"
                if found == "statistical"
                else f"{names}: {found} here, where the loss curve alone is promised"
            )
        return "; ".join(told)

    @property
    def _unmet(self) -> set[str]:
        """What became of those that do not hold."""
        resumed = {"resumed"} if not all(one.holds for one in self.resumes) else set()
        return {row.found for row in self.rows if not row.holds} | resumed

    @property
    def _harmless(self) -> bool:
        return all(finding.harmless for finding in self.findings)


def _about(row: Row, shards: int) -> list[str]:
    """Return what there is to say of a row beside its cells."""
    if row.found == "skipped":
        return []
    who = f"{row.strategy} x {row.workers}"
    if row.shards not in (0, shards):
        who += f" ({row.shards} shards)"
    if row.found == "refused":
        return [f"{row.strategy} x {row.workers} was refused: {row.first}"]
    if row.found == "failed":
        return [f"{who} failed: {row.first}"]
    lines = [f"{who}: {row.band}"] if row.band else []
    lines += [f"{who} first differs at {row.first}"] if row.first and row.found != "unverified" else []
    lines += [f"{who} is not verified: {row.first}"] if row.found == "unverified" else []
    lines += [f"  first operation that differs: {row.operation}"] if row.operation else []
    return lines


def _cells(row: Row) -> tuple[str | Text, ...]:
    if row.found == "skipped":
        skipped = Text(f"skipped: {row.first}", style="dim")
        return row.strategy, str(row.workers), str(row.shards), "", skipped, "", ""
    by_size = row.relative is not None and row.found != "statistical"
    largest = f" ({row.relative:.2g})" if by_size else ""
    style = "green" if row.holds else "red"
    return (
        row.strategy,
        str(row.workers),
        str(row.shards),
        row.promised,
        Text(row.found + largest, style=style),
        str(row.lost),
        str(row.repeated),
    )
