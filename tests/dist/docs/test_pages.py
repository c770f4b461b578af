"""What the documents show works as they show it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import pytest

from paceline import strategies
from tests.dist.docs.conftest import borrowed
from tests.dist.docs.pages import REPOSITORY, MissingProgramError, Ran, blocks, run_page
from tests.dist.docs.warm import Warm

README = REPOSITORY / "README.md"
PAGES = sorted((REPOSITORY / "docs").glob("*.md"))


@pytest.fixture(scope="module")
def running(
    request: pytest.FixtureRequest, warm: SimpleQueue[Warm], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Path, Future[list[Ran]]]]:
    """Run the pages that tests ask for, two at a time: most of what they show takes its time to start, on one core."""

    def run(page: Path, folder: Path) -> list[Ran]:
        with borrowed(warm) as one:
            return run_page(page, folder, one)

    asked = (getattr(item, "callspec", None) for item in request.session.items if item.path == Path(__file__))
    pages = dict.fromkeys(one.params["page"] for one in asked if one and "page" in one.params)
    with ThreadPoolExecutor(2) as pool:
        yield {page: pool.submit(run, page, tmp_path_factory.mktemp(page.stem)) for page in pages}


def of(*pages: Path) -> pytest.MarkDecorator:
    """Run a test on each of these pages."""
    return pytest.mark.parametrize("page", pages, ids=lambda page: page.stem)


@of(README)
def test_the_readme_runs(page: Path, running: dict[Path, Future[list[Ran]]]) -> None:
    ran = running[page].result()
    assert any(one.command == "make demo" for one in ran)
    assert any("python -m pytest" in one.output for one in ran if one.command == "make test")


@of(README)
def test_strategies_that_the_readme_compares_give_the_same_bits(
    page: Path, running: dict[Path, Future[list[Ran]]]
) -> None:
    ran = running[page].result()
    results = [json.loads(one.output.splitlines()[-1]) for one in ran if "--json" in one.command]
    bitwise = {name for name in strategies.STRATEGIES if strategies.load(name).exactness == "bitwise"}
    assert {result["strategy"] for result in results} == bitwise - {"hybrid"}  # which needs a sparse table
    assert len({result["weights_sha256"] for result in results}) == 1


def test_the_readme_lists_every_strategy_with_the_exactness_it_declares() -> None:
    rows = dict(re.findall(r"^\| `([\w-]+)` \|.*\| (\w+) \|$", README.read_text(), re.MULTILINE))
    assert rows == {name: str(strategies.load(name).exactness) for name in strategies.STRATEGIES}


@of(*PAGES)
def test_a_page_runs(page: Path, running: dict[Path, Future[list[Ran]]]) -> None:
    try:
        assert running[page].result()
    except MissingProgramError as missing:
        pytest.skip(str(missing))


@of(REPOSITORY / "docs" / "several.md")
def test_the_gan_comes_to_the_same_on_one_worker_and_on_two(
    page: Path, running: dict[Path, Future[list[Ran]]]
) -> None:
    ran = [one for one in running[page].result() if "gan.py" in one.command]
    assert len(ran) == 2
    assert len({one.output.splitlines()[-1] for one in ran}) == 1


def test_every_example_is_run_by_some_page() -> None:
    shown = "".join(
        block.text for page in [README, *PAGES] for block in blocks(page) if block.language == "console"
    )
    for example in (REPOSITORY / "examples").glob("*.py"):
        assert f"examples/{example.name}" in shown


def test_every_link_leads_somewhere() -> None:
    for page in [README, REPOSITORY / "CONTRIBUTING.md", *PAGES]:
        for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
            assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name}: {target}"
