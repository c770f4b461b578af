"""What a check found, for a program and for a person: one kind of report, laid out in one way. Imports no torch."""

from __future__ import annotations

import html
import io
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline import documents
from paceline.compat.python import random_preserved
from paceline.observe.formats import duration

with random_preserved():  # rich draws a number as it is imported, which would be one of the script's
    from rich import box
    from rich.console import Console, Group, RenderableType
    from rich.table import Table
    from rich.text import Text

Part = str | Text | Table
"""A line, or a table."""


class Report(ABC):
    """What `verify`, `audit` and `chaos` print, and what their exit status says."""

    @property
    @abstractmethod
    def holds(self) -> bool:
        """Whether what was checked is as it must be."""

    @abstractmethod
    def parts(self) -> Iterable[Part]:
        """Return what a person reads, from top to bottom."""

    @property
    @abstractmethod
    def verdict(self) -> str:
        """The last line."""

    seconds: float | None = None
    """How long it took, where that is worth saying."""

    def as_json(self) -> dict[str, Any]:
        """Return it as plain data: every field, whether it holds, and how long it took where that is known."""
        plain: dict[str, Any] = {**documents.plain(self), "holds": self.holds}
        seconds = plain.pop("seconds", None)
        return plain if seconds is None else {**plain, "wall_s": round(seconds, 3)}

    def render(self) -> RenderableType:
        """Lay it out."""
        took = "" if self.seconds is None else f" ({duration(self.seconds)})"
        last = Text(self.verdict + took, style="bold green" if self.holds else "bold red")
        return Group(*(Text(one) if isinstance(one, str) else one for one in self.parts()), last)

    def __str__(self) -> str:
        """Return what a person reads as plain text."""
        text = io.StringIO()
        Console(file=text, width=120, highlight=False).print(self.render(), soft_wrap=True)
        return text.getvalue().rstrip()

    def _repr_html_(self) -> str:
        # A notebook shows it in its own font, on its own background.
        return f"<pre>{html.escape(str(self))}</pre>"

    def lines(self) -> list[str]:
        """Return its lines as plain text, without tables; the last is the verdict."""
        return [str(one) for one in self.parts() if not isinstance(one, Table)] + [self.verdict]


def columns(names: Sequence[str], *, left: Sequence[str], wraps: Sequence[str] = ()) -> Table:
    """Return a table without rows; numbers stand on the right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    for name in names:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=name not in wraps)
    return table


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
