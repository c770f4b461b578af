"""What is wrong is called so: a different answer, an exception on one worker, a refusal that is not declared."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.zoo.broken import Astray, Raising, Refusing, broken
from tests.zoo.cells import Cell
from tests.zoo.exhibits import chosen
from tests.zoo.layouts import LAYOUTS
from tests.zoo.running import Zoo

DDP = next(layout for layout in LAYOUTS if layout.name == "ddp-2w2s")


@pytest.fixture(scope="module")
def verdicts() -> dict[str, str]:
    """Run what is wrong and what is right in company."""
    (plain,) = chosen(["plain"])
    wrong = [broken(made) for made in (Astray, Raising, Refusing)]
    declared = replace(plain, name="declared", refused_by={"ddp": "never"})
    exhibits = [plain, *wrong, replace(plain, name="after"), declared]
    with Zoo() as zoo:
        return {name: str(verdict) for name, verdict in zoo.run(Cell(one, DDP) for one in exhibits).items()}


def test_a_different_answer(verdicts: dict[str, str]) -> None:
    assert verdicts["Astray@ddp-2w2s"].startswith("WRONG weights differ by")


def test_an_exception(verdicts: dict[str, str]) -> None:
    assert verdicts["Raising@ddp-2w2s"] == "CRASH ZeroDivisionError: as it was told (rank 1)"


def test_refusals_are_declared(verdicts: dict[str, str]) -> None:
    assert verdicts["Refusing@ddp-2w2s"].startswith("UNDECLARED refusal: no model today.")
    assert verdicts["declared@ddp-2w2s"].startswith("UNDECLARED success")


def test_the_others_are_not_touched(verdicts: dict[str, str]) -> None:
    assert verdicts["plain@ddp-2w2s"] == verdicts["after@ddp-2w2s"] == "same"
