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
            f": {report.steps} steps, {report.shards} shards, against one process (loss {report.loss:.6g} at the end)",
        ),
        _table(report),
    ]
    parts += [
        Text(
            f"{row.strategy} x {row.workers} first differs at {row.first}"
            if row.found != "failed"
            else f"{row.strategy} x {row.workers} failed: {row.first}"
        )
        for row in report.rows
        if row.first and row.found != "skipped"
    ]
    if any(row.found == "numeric" or row.promised == "numeric" for row in report.rows):
        parts.append(
            Text(
                f"numeric: a relative difference of at most {report.bound:.3g} after the last step",
                style="dim",
            )
        )
    for finding in report.findings:
        parts += [Text(line) for line in finding.lines()]
    broken = any(not row.holds for row in report.rows)
    if broken and not any(not finding.harmless for finding in report.findings):
        parts.append(Text("No cause was found in the task. Ruled out:"))
        parts += [Text(f"  {name}") for name in report.ruled_out]
    parts += [Text(f"not checked: {what}", style="dim") for what in report.unchecked]
    verdict = (
        "every promise holds"
        if report.holds
        else "NOT the same answer"
        if broken
        else "the answer depends on how it is computed"
    )
    parts.append(
        Text(f"{verdict} ({report.seconds:.1f} s)", style="bold green" if report.holds else "bold red")
    )
    return Group(*parts)


def _table(report: Report) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in ("strategy", "workers", "promised", "found", "lost", "repeated", "time"):
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
        return row.strategy, str(row.workers), "", Text(f"skipped: {row.first}", style="dim"), "", "", ""
    largest = f" ({row.relative:.2g})" if row.relative is not None else ""
    style = "green" if row.holds else "red"
    return (
        row.strategy,
        str(row.workers),
        row.promised,
        Text(row.found + largest, style=style),
        str(row.lost),
        str(row.repeated),
        f"{row.seconds:.2f} s",
    )
