"""What needs no torch does not load it."""

import json
import subprocess
import sys

import pytest

from paceline import __version__
from paceline.strategies import STRATEGIES
from paceline.tasks import TASKS
from tests.patience import HANG_S

# Ends like the command itself, but with 77 when torch was loaded on the way.
WATCHED = """
import sys
from paceline.cli import main
try:
    main.run()
except SystemExit as end:
    sys.stdout.flush()
    sys.exit(77 if "torch" in sys.modules else end.code)
"""


def paceline(*arguments):
    return subprocess.run(
        [sys.executable, "-c", WATCHED, *arguments],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], ["train", "run", "tasks", "export", "collectives"]),
        (["--help"], ["train", "run", "tasks", "export", "collectives"]),
        (["-h"], ["train", "run"]),
        (["train", "--help"], ["--workers", "--strategy", "--resume", *STRATEGIES]),
        (["run", "--help"], ["SCRIPT", "--nproc-per-node"]),
        (["--version"], [__version__]),
        (["tasks"], list(TASKS)),
    ],
    ids=" ".join,
)
def test_it_answers_without_torch(arguments, expected):
    ended = paceline(*arguments)
    assert (ended.returncode, ended.stderr) == (0, "")
    for text in expected:
        assert text in ended.stdout


def test_the_version_is_all_that_is_printed():
    assert paceline("--version").stdout == f"{__version__}\n"


def test_the_tasks_as_an_object():
    listed = json.loads(paceline("tasks", "--json").stdout)
    assert {name: entry["reference"] for name, entry in listed.items()} == {
        name: reference for name, (reference, _) in TASKS.items()
    }


def test_a_command_misspelt_is_one_line_without_torch():
    ended = paceline("tran", "digits")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "error: No such command 'tran'. Did you mean 'train'? See paceline --help.\n"
