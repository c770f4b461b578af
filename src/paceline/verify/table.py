"""Shows a verification to a person: one table, then the first difference, the causes, and what was ruled out."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from paceline.verify.report import Report, Row


def render(report: Report) -> RenderableType:
    """Lay out a report."""
    parts: list[RenderableType] = [
        Text.assemble(
            (report.task, "bold"),
            f": {report.steps} steps, {_counts(report)} shards, against one process (loss {report.loss:.6g} at the end)",
        ),
        _table(report),
    ]
    parts += [
        Text(line) for line in dict.fromkeys(line for row in report.rows for line in _about(row, report))
    ]
    parts += [Text(one.line(), style="" if one.holds else "red") for one in report.resumes]
    if any(row.found == "numeric" or row.promised == "numeric" for row in report.rows):
        parts.append(
            Text(
                f"numeric: a relative difference of at most {report.bound:.3g} after the last step",
                style="dim",
            )
        )
    for finding in report.findings:
        parts += [Text(line) for line in finding.lines()]
    broken = not (all(row.holds for row in report.rows) and all(one.holds for one in report.resumes))
    unmet = {row.found for row in report.rows if not row.holds} | {
        "resumed" for one in report.resumes if not one.holds
    }
    if unmet - {"refused"} and all(finding.harmless for finding in report.findings):
        parts.append(Text("No cause is confirmed. Ruled out:"))
        parts += [Text(f"  {name}") for name in report.ruled_out]
    parts += [Text(f"not checked: {what}", style="dim") for what in report.unchecked]
    verdict = (
        "every promise holds" + (", statistical ones by the loss curve alone" if _by_curve(report) else "")
        if report.holds
        else "NOT verified"
        if unmet and unmet <= {"unverified", "refused"} and all(one.harmless for one in report.findings)
        else "NOT the same answer"
        if broken
        else "the answer depends on how it is computed"
    )
    parts.append(
        Text(f"{verdict} ({report.seconds:.1f} s)", style="bold green" if report.holds else "bold red")
    )
    return Group(*parts)


def _counts(report: Report) -> str:
    return " and ".join(map(str, report.shard_counts or (report.shards,)))


def _by_curve(report: Report) -> bool:
    return any(row.promised == "statistical" and row.found == "statistical" for row in report.rows)


def _about(row: Row, report: Report) -> list[str]:
    """Return what there is to say of a row beside its cells."""
    if row.found == "skipped":
        return []
    who = f"{row.strategy} x {row.workers}"
    if row.shards not in (0, report.shards):
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


def _table(report: Report) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    for name in ("strategy", "workers", "shards", "promised", "found", "lost", "repeated"):
        table.add_column(
            name,
            justify="left" if name in ("strategy", "promised", "found") else "right",
            no_wrap=name != "found",
        )
    for row in report.rows:
        table.add_row(*_cells(row))
    return table


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
