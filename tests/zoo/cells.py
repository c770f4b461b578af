"""A cell of the matrix: one task on one layout, in one mode; and what became of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tests.zoo.exhibits import Exhibit
from tests.zoo.layouts import LAYOUTS, PLAIN, Layout

TRAIN, RESUME = "train", "resume"
GOOD = ("same", "within", "band", "refused")


@dataclass(frozen=True)
class Cell:
    """One task on one layout, in one mode."""

    exhibit: Exhibit
    layout: Layout
    mode: str = TRAIN

    @property
    def name(self) -> str:
        """Return its name on the command line: `task@strategy-2w4s`, and the mode where it is not training."""
        return f"{self.exhibit.name}@{self.layout.name}" + (f":{self.mode}" if self.mode != TRAIN else "")

    @property
    def refusal(self) -> str | None:
        """Return a part of the line that may refuse it, if it is declared that one does."""
        return self.exhibit.refusal(self.layout.label)


@dataclass(frozen=True)
class Verdict:
    """What became of a cell: same, within a bound, in a band, refused; or WRONG, CRASH, HANG and the like."""

    word: str
    detail: str = ""

    @property
    def good(self) -> bool:
        """Whether that is one of the four ends that are allowed."""
        return self.word in GOOD

    @classmethod
    def parse(cls, text: str) -> Verdict:
        """Read what `str` made."""
        word, _, detail = text.partition(" ")
        return cls(word.rstrip(":"), detail)

    def __str__(self) -> str:
        return (
            f"{self.word}: {self.detail}" if self.word == "refused" else f"{self.word} {self.detail}".rstrip()
        )


def every(exhibits: Iterable[Exhibit], labels: Sequence[str] = ()) -> list[Cell]:
    """Return every cell of these tasks on these strategies (all of them where none is named)."""
    found: list[Cell] = []
    for exhibit in exhibits:
        for layout in LAYOUTS:
            if labels and layout.label not in labels and layout.name not in labels:
                continue
            if not _belongs(exhibit, layout):
                continue
            found.append(Cell(exhibit, layout))
            if layout.resumes and exhibit.resumes and exhibit.refusal(layout.label) is None:
                found.append(Cell(exhibit, layout, RESUME))
    return found


def _belongs(exhibit: Exhibit, layout: Layout) -> bool:
    if layout == PLAIN and not exhibit.plain and exhibit.refusal(layout.label) is None:
        return False
    if layout.mesh:
        return exhibit.meshes
    if exhibit.refusal(layout.label) is not None:  # that one layout of each strategy says so is enough
        return layout == [one for one in LAYOUTS if one.label == layout.label][-1]
    return True
