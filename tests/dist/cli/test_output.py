"""A standard output that takes nothing: one line, no traceback, and a run that goes on."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.launch.console import Console

FULL = Path("/dev/full")
pytestmark = pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full here")


@pytest.mark.parametrize("arguments", [("tasks",), ("tasks", "--json"), ("--help",)])
def test_a_full_standard_output_is_one_line(arguments):
    with FULL.open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "paceline", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert ended.stderr == (
        "error: standard output cannot be written: No space left on device. "
        "The command is done; only what it had to say is lost.\n"
    )
    assert ended.returncode == 1


def test_to_a_reader_who_went_away_nothing_is_said():
    shown = subprocess.Popen(
        [sys.executable, "-m", "paceline", "tasks"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    shown.stdout.close()
    assert (shown.stderr.read(), shown.wait()) == ("", 1)
    shown.stderr.close()


def test_a_reader_who_went_away_ends_a_run_and_not_its_clearing_up(monkeypatch, capsys):
    reading, writing = os.pipe()
    os.close(reading)
    console = Console()
    with contextlib.suppress(BrokenPipeError), os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        with pytest.raises(BrokenPipeError):
            console.output("out", b"some words\n")
        console.output("out", b"last words\n")
        monkeypatch.undo()
    assert capsys.readouterr().err == ""


def test_a_run_whose_output_nobody_takes_goes_on(monkeypatch, capsys):
    console = Console()
    full = FULL.open("w")
    monkeypatch.setattr(sys, "stdout", full)
    console.output("out", b"some words\n")
    console.output("out", b"more of them\n")
    console.output("err", b"and these\n")
    monkeypatch.undo()
    with pytest.raises(OSError, match="No space"):
        full.close()
    said = capsys.readouterr().err
    assert said.count("standard output cannot be written (No space left on device)") == 1
    assert "and these" in said
