"""More shards than workers, an evaluation, a resume; a loss curve for what is statistical; the first operation that differs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.cli.application import app
from paceline.training.spec import TrainSpec
from paceline.verify.proof.check import verify
from paceline.verify.proof.request import VerifyRequest
from paceline.verify.proof.task_report import TaskReport

TASKS = str(Path(__file__).with_name("broken.py"))


def check(
    task: str, *strategies: str, steps: int = 4, workers: tuple[int, ...] = (2,), **asked: object
) -> TaskReport:
    spec = TrainSpec(task=f"tests.dist.verify.broken:{task}", name=task, steps=steps)
    common = {"threads": 1, "more": {"device": "cpu"}, "hash_seed": False}
    return verify(VerifyRequest(spec=spec, strategies=strategies, workers=workers, **common, **asked))  # type: ignore[arg-type]


def test_by_default_there_are_more_shards_than_workers_too_and_a_run_is_resumed_otherwise() -> None:
    report = check("Evaluated", "ddp", "dp", steps=4)
    assert report.holds, report
    assert report.shard_counts == (2, 4)
    assert [(row.strategy, row.shards, row.found) for row in report.rows] == [
        (strategy, shards, "bitwise") for shards in (2, 4) for strategy in ("ddp", "dp")
    ]
    assert [(one.saved_by, one.resumed_by, one.step, one.found) for one in report.resumes] == [
        ("ddp x 2", "dp x 2", 2, "bitwise"),
        ("dp x 2", "ddp x 2", 2, "bitwise"),
    ]
    assert not report.unchecked[1:], report.unchecked


def test_what_is_statistical_is_held_to_its_loss_curve() -> None:
    tuning = {"local_steps": 4}
    asked = {"steps": 12, "shards": 2, "resume": False}
    honest = check("Sound", "local-sgd", tuning=tuning, **asked)
    (row,) = honest.rows
    assert (row.promised, row.found) == ("statistical", "statistical"), row
    assert "band" in row.band
    wild = {**tuning, "outer_optimizer": "nesterov", "outer_lr": 50.0}
    (row,) = check("Sound", "local-sgd", tuning=wild, **asked).rows
    assert (row.found, row.holds) == ("diverged", False), row
    (row,) = check("Sound", "local-sgd", tuning=tuning, **{**asked, "steps": 4}).rows
    assert (row.found, row.holds) == ("unverified", False), row


def test_where_no_cause_is_confirmed_the_first_operation_that_differs_is_named() -> None:
    report = check("ModelOfWorld", "ddp", steps=2, shards=2, resume=False)
    assert not report.holds
    assert all(finding.harmless for finding in report.findings), report.findings
    operation = report.rows[0].operation
    assert "in module 1: its argument 1 is another (2.0 not 1.0)" in operation
    assert "shard 0" in operation


def test_the_options_of_train_are_verified_with(capsys: pytest.CaptureFixture[str]) -> None:
    asked = (
        "--strategy ddp,ps,fsdp --workers 2 --shards 3 --steps 3 --no-hash-seed --no-resume --threads 1 --device cpu --json "
        "--precision bf16 --micro-batch 1 --max-grad-norm 0.1 --num-workers 1 --servers 2 --transport gloo --epochs 2"
    ).split()
    assert app(args=["verify", f"{TASKS}:Evaluated", *asked], standalone_mode=False) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(row["strategy"], row["found"]) for row in result["rows"]] == [
        ("ddp", "bitwise"),
        ("ps", "bitwise"),
        ("fsdp", "bitwise"),
    ]
