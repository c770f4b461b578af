"""A script that cleans up around its call of `launch`: once, and not in every worker."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from paceline.errors import InputError

TOP = """
import os
import paceline

def note():
    with open("cleaned", "a") as file:
        file.write(f"{os.getpid()}\\n")

def work(run):
    return run.world.rank

def launched():
    return paceline.launch(work, workers=2, threads=1, device="cpu")

"""
BARE = """
try:
    found = launched()
finally:
    note()
"""
IN_A_FUNCTION = """
def main():
    try:
        return launched()
    finally:
        note()

found = main()
"""
EVERYTHING = """
try:
    found = launched()
except:
    note()
    raise
"""
GUARDED = """
if __name__ == "__main__":
    try:
        found = launched()
    finally:
        note()
"""
QUIET = """
try:
    def helper():
        return launched()
finally:
    pass

try:
    found = helper()
except ValueError:
    note()
"""


def ran(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """Run a script as Python does, and return what its `launch` returned."""
    monkeypatch.chdir(folder)
    (folder / "script.py").write_text(TOP + text)
    return runpy.run_path(str(folder / "script.py"), run_name="__main__")["found"]


@pytest.mark.parametrize(
    "text", [BARE, IN_A_FUNCTION, EVERYTHING], ids=["bare", "in a function", "everything"]
)
def test_clean_up_that_every_worker_would_run_is_refused_before_any_starts(text, tmp_path, monkeypatch):
    word = "except" if text == EVERYTHING else "finally"
    with pytest.raises(
        InputError, match=rf"script\.py, line \d+: .*`{word}` would run in every worker.*__main__"
    ):
        ran(text, tmp_path, monkeypatch)
    assert len((tmp_path / "cleaned").read_text().splitlines()) == 1


def test_under_the_guard_it_runs_once(tmp_path, monkeypatch):
    assert ran(GUARDED, tmp_path, monkeypatch) == (0, 1)
    assert len((tmp_path / "cleaned").read_text().splitlines()) == 1


def test_what_no_worker_runs_on_its_way_out_is_let_be(tmp_path, monkeypatch):
    assert ran(QUIET, tmp_path, monkeypatch) == (0, 1)
    assert not (tmp_path / "cleaned").exists()
