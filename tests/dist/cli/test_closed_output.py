"""A process that is started without standard output or error does its work, and writes what it can."""

import subprocess
import sys

import pytest

from tests.patience import HANG_S

PACELINE = f"{sys.executable} -m paceline"
SCRIPT = """
import os, sys
kept = open("kept", "w")
import paceline

def main(run):
    print("said by a worker")
    return run.world.rank

open("told", "w").write(f"{kept.fileno()} {paceline.launch(main, out='run')}")
kept.write("mine")
"""


def shell(line, folder):
    """Run a line of the shell's; return its status, and what it wrote to what is open."""
    arguments = ["sh", "-c", line]
    ended = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, timeout=HANG_S, check=False)
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_command_without_streams(closed, tmp_path):
    status, said = shell(f"{PACELINE} tasks {closed}", tmp_path)
    assert status == 0
    assert "Traceback" not in said
    assert ("digits" in said) == (closed == "2>&-")


def test_training_without_streams(tmp_path):
    status, said = shell(f"{PACELINE} train digits --steps 1 --workers 1 --out run >&- 2>&-", tmp_path)
    assert (status, said) == (0, "")
    assert "run_finished" in (tmp_path / "run" / "events.jsonl").read_text()


def test_a_script_whose_file_has_the_number_of_standard_output(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    assert shell(f"{sys.executable} script.py >&-", tmp_path) == (0, "")
    assert (tmp_path / "told").read_text() == "1 (0,)"
    assert (tmp_path / "kept").read_text() == "mine"
    assert "said by a worker" in (tmp_path / "run" / "logs" / "rank-0.log").read_text()
