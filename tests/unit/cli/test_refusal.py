"""Ranks that are refused alike say so once."""

import os
import socket
import subprocess
import sys

import pytest

from paceline.cli import refusal
from tests.patience import HANG_S

RANK = "import sys; from paceline.cli.refusal import refuse; refuse(sys.argv[1])"


def said(*texts, **variables):
    """Have one rank refuse for each text, as one launcher starts them; give what all of them print."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, text],
            env={**os.environ, "WORLD_SIZE": str(len(texts)), "RANK": str(rank), **variables},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, text in enumerate(texts)
    ]
    return sorted(one.communicate(timeout=HANG_S)[1] for one in started)


def test_ranks_that_are_refused_alike_say_so_once():
    assert said("no", "no", "no") == ["", "", "no\n"]


def test_what_one_rank_alone_has_to_say_is_said():
    assert said("no", "never") == ["never\n", "no\n"]


def test_a_process_on_its_own_does_not_wait(capsys, monkeypatch):
    monkeypatch.setattr(refusal, "_wait", None)
    refusal.refuse("no")
    assert capsys.readouterr().err == "no\n"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="abstract sockets are Linux's")
def test_whoever_holds_the_name_and_says_nothing_silences_nobody(capsys, monkeypatch):
    monkeypatch.setattr(refusal, "LATE_S", 0.1)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(refusal._name("no"))  # and answers nobody
        refusal.refuse("no")
    assert capsys.readouterr().err == "no\n"
