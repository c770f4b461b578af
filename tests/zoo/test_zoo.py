"""A part of the zoo, another one with each commit; `make zoo` runs the whole."""

from __future__ import annotations

import random

import pytest

from tests.shares import commit
from tests.zoo.cells import Cell, every
from tests.zoo.exhibits import chosen
from tests.zoo.layouts import LAYOUTS, PLAIN
from tests.zoo.open import is_open
from tests.zoo.running import Zoo

TASKS, WAYS = 10, 4
"""How much of it: about a minute on two quiet cores."""


def test_a_part_of_the_zoo(capsys: pytest.CaptureFixture[str]) -> None:
    cells = part(commit())
    with capsys.disabled():
        print(f"\nzoo: {' '.join(cell.name for cell in cells)}")
    with Zoo() as zoo:
        verdicts = zoo.run(cells)
    bad = [f"{name}: {verdict}" for name, verdict in verdicts.items() if not verdict.good]
    assert not bad, "run one again with `python -m tests.zoo --cell NAME`:\n" + "\n".join(bad)
    assert verdicts.keys() == {cell.name for cell in cells}


def part(seed: str) -> list[Cell]:
    """Return the cells of some tasks on some layouts; a seed always gives the same ones."""
    draw = random.Random(seed)
    exhibits = chosen(())
    tasks = draw.sample(exhibits, min(TASKS, len(exhibits)))
    ways = draw.sample([layout for layout in LAYOUTS if layout != PLAIN], WAYS)
    cells = every(tasks, [PLAIN.name, *(layout.name for layout in ways)])
    return [cell for cell in cells if not is_open(cell.name)]


def test_every_cell_is_in_some_part() -> None:
    wanted = {cell.name for cell in every(chosen(())) if not is_open(cell.name)}
    assert {cell.name for seed in range(2000) for cell in part(str(seed))} == wanted
