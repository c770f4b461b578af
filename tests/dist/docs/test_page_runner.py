"""The runner of pages finds what is wrong with a page."""

from __future__ import annotations

import shutil
from pathlib import Path
from queue import SimpleQueue

import pytest

from tests.dist.docs import pages
from tests.dist.docs.conftest import borrowed
from tests.dist.docs.pages import run_page
from tests.dist.docs.warm import Warm

SCRIPT = """
import atexit, os, sys, threading, time
import paceline

def rank(run):
    return run.world.rank, os.getcwd()

print(__name__, __file__, sys.modules["__main__"].rank is rank, sys.argv, sys.path[0], os.getcwd())
print(os.environ["COLUMNS"], sys.stdin.read(), sys.stdout.isatty())
{launch}
print("on the other stream", file=sys.stderr, flush=True)
atexit.register(print, "the very end")
threading.Timer(0.2, print, ["a thread that is waited for"]).start()
{end}
"""


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("```python\nassert 1 + 1 == 3\n```\n", "AssertionError"),
        ("```python\n# lonely.py\nprint(1)\n```\n", "runs no command"),
        ("```python\n# examples/own_loop.py\nprint(1)\n```\n", "is not what"),
        ("```yaml\na: 1\n```\n", "nothing runs"),
        ("```console\n$ echo one\ntwo\n```\n", "printed no line"),
        ("```console\n$ python -c 'raise SystemExit(3)'\n```\n", "ended with 3"),
        ("```console\n$ echo one\n", "fences"),
    ],
)
def test_a_page_that_is_wrong_fails(text: str, complaint: str, tmp_path: Path) -> None:
    page, folder = tmp_path / "page.md", tmp_path / "folder"
    page.write_text(text)
    folder.mkdir()
    with pytest.raises(AssertionError, match=complaint):
        run_page(page, folder)


def test_a_page_that_is_right_gives_what_its_commands_printed(tmp_path: Path) -> None:
    page, folder = tmp_path / "page.md", tmp_path / "folder"
    page.write_text(
        "```python\n# two.py\nprint('two halves')\n```\n\n```console\n$ python two.py\ntwo ...\n```\n"
    )
    folder.mkdir()
    assert [ran.output for ran in run_page(page, folder)] == ["two halves\n"]


def test_a_program_of_an_extra_that_is_missing_is_no_fault_of_the_page(tmp_path, monkeypatch) -> None:
    page, folder = tmp_path / "page.md", tmp_path / "folder"
    page.write_text("```console\n$ mpirun -n 2 true\n```\n")
    folder.mkdir()
    monkeypatch.setattr(pages, "BINARIES", tmp_path)
    with pytest.raises(pages.MissingProgramError, match="of the extra mpi, is not installed here"):
        run_page(page, folder)


@pytest.mark.parametrize(
    ("launch", "end", "status"),
    [("print(paceline.launch(rank, workers=2), flush=True)", "1 / 0", 1), ("", "sys.exit(3)", 3)],
)
def test_a_copy_of_a_warm_process_does_what_a_started_one_does(
    launch: str, end: str, status: int, warm: SimpleQueue[Warm], tmp_path: Path
) -> None:
    page, folder = tmp_path / "page.md", tmp_path / "folder"
    command = f"```console\n$ python show.py one 'two words'  # exit status {status}\n```\n"
    page.write_text(f"```python\n# show.py{SCRIPT.format(launch=launch, end=end)}```\n{command}")
    printed = []
    with borrowed(warm) as one:
        for runner in (one, None):
            folder.mkdir()
            printed += [ran.output.splitlines() for ran in run_page(page, folder, runner)]
            shutil.rmtree(folder)
    copied, started = printed
    assert "a thread that is waited for" in started
    assert started[-1] == "the very end"
    # A traceback from a copy shows the frames below the script as well.
    assert [line for line in copied if not line.startswith("  ")] == [
        line for line in started if not line.startswith("  ")
    ]
