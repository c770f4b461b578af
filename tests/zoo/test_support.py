"""docs/support.md says what is declared, and every cell has a name that the command understands."""

from __future__ import annotations

from tests.zoo import support
from tests.zoo.cells import every
from tests.zoo.exhibits import chosen


def test_the_page_is_what_the_declarations_generate() -> None:
    assert support.PAGE.read_text() == support.page(chosen(())), "run `python -m tests.zoo --page`"


def test_names_of_cells_are_unique() -> None:
    names = [cell.name for cell in every(chosen(()))]
    assert len(names) == len(set(names))
