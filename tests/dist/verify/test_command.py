"""`paceline verify` as it is typed: the table, the JSON, the exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.cli.application import app
from paceline.errors import InputError

TASKS = str(Path(__file__).with_name("broken.py"))
SCRIPT = str(Path(__file__).with_name("plain_ddp.py"))
QUICK = ["--steps", "4", "--no-hash-seed", "--device", "cpu", "--threads", "1"]


def verify(*arguments: str) -> int:
    return app(args=["verify", *arguments], standalone_mode=False)


def test_json_of_a_sound_task(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--strategy", "ddp,dp", "--workers", "3,2", "--batch-size", "8", "--seed", "5", "--json", *QUICK]
    assert verify(f"{TASKS}:Normalised", *asked) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["holds"], result["steps"], result["shards"]) == (True, 4, 3)
    assert {(row["strategy"], row["workers"], row["promised"], row["found"]) for row in result["rows"]} == {
        (strategy, workers, "bitwise", "bitwise") for strategy in ("ddp", "dp") for workers in (2, 3)
    }
    assert result["findings"] == []


def test_a_numeric_run_keeps_a_numeric_promise_and_says_by_how_much(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ["--strategy", "ddp", "--workers", "3", "--shards", "7", "--exact", "numeric", *QUICK]
    assert verify(f"{TASKS}:Sound", *asked) == 0
    shown = capsys.readouterr().out
    assert "numeric (" in shown
    assert "gradient 0.weight" in shown
    assert "at most 2.5e-05 after the last step" in shown
    assert "every promise holds" in shown


def test_a_broken_task_ends_with_status_1_its_cause_and_its_remedy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert verify(f"{TASKS}:ModelOfRank", "--strategy", "ddp,single", "--workers", "2", *QUICK) == 1
    shown = " ".join(capsys.readouterr().out.split())
    for words in (
        "skipped: single is one process",
        "ddp x 2 first differs at step 0, rank 1: loss of shard 1 (",
        "Cause: the model or the loss reads its rank, in module 1.",
        "remedy: compute the same on every rank",
        "not checked: another hash seed (left out)",
        "NOT the same answer",
    ):
        assert words in shown


def test_a_failure_of_the_task_s_own_shows_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(f"{TASKS}:Raises", "--workers", "2", *QUICK) == 1
    assert "a fault of the user's own" in capsys.readouterr().err.splitlines()[-1]


def test_a_script_with_arguments_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert verify("--script", SCRIPT, "-n", "2", "--json", "--", "--fault", "no set_epoch") == 1
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [finding["probe"] for finding in result["findings"]] == ["same_order"]
    assert verify("--script", SCRIPT) == 0
    assert "computes what its one-process run computes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give one TASK to verify"),
        (["digits", "addition"], "not also addition"),
        (["digits", "--workers", "two"], "is no list of numbers"),
        (["digits", "--steps", "0"], "must be at least 1"),
        (["--script", "nowhere.py"], "there is no script nowhere.py"),
        (["--script", SCRIPT, "-n", "1"], "at least 2 workers"),
    ],
)
def test_what_cannot_be_asked_for(arguments: list[str], words: str) -> None:
    with pytest.raises(InputError, match=words):
        verify(*arguments)
