"""What can be verified, and when a promise holds."""

from __future__ import annotations

import inspect
import io
import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest
from rich.console import Console

from paceline.cli.train import train
from paceline.cli.verify import verify
from paceline.errors import InputError
from paceline.strategies.tuning import Tuning
from paceline.training.spec import TrainSpec
from paceline.verify.proof.request import REFERENCE, Candidate, VerifyRequest
from paceline.verify.proof.task_report import Row, TaskReport
from paceline.verify.report import Finding

SPEC = TrainSpec(task="digits", name="digits", steps=2)


def test_pairs_that_cannot_be_run_are_left_out_with_a_word() -> None:
    request = VerifyRequest(spec=SPEC, strategies=("single", "ddp"), workers=(1, 2, 4), shards=3)
    able, unable = request.candidates()
    assert able == [Candidate("single", 1), Candidate("ddp", 1), Candidate("ddp", 2)]
    reasons = {str(candidate): reason for candidate, reason in unable}
    assert reasons["single x 2"] == "single is one process"
    assert reasons["ddp x 4"] == "4 workers cannot share 3 shards"


def test_all_runs_have_the_same_shards_and_threads() -> None:
    request = VerifyRequest(spec=SPEC, workers=(1, 3), threads=2)
    assert {request.options(one).total_shards for one in request.candidates()[0]} == {3}
    assert request.worker_threads == 2


def test_each_strategy_is_tuned_by_what_means_something_to_it() -> None:
    tuning = {"reshard": False, "schedule": "gpipe", "activation_checkpointing": "blocks"}
    request = VerifyRequest(spec=SPEC, strategies=("fsdp", "pp", "fsdp=1,tp=2"), tuning=tuning)
    found = {one: request.options(Candidate(one, 2)).tuning for one in request.strategies}
    assert found["fsdp"] == Tuning(reshard=False, activation_checkpointing="blocks")
    assert found["pp"] == Tuning(schedule="gpipe", activation_checkpointing="blocks")
    assert found["fsdp=1,tp=2"] == Tuning(reshard=False, activation_checkpointing="blocks")
    assert request.options(REFERENCE).tuning == Tuning()


def test_by_default_shards_are_as_many_as_workers_and_more() -> None:
    request = VerifyRequest(spec=SPEC, workers=(1, 3))
    assert request.shard_counts(None) == (3, 6)
    assert request.shard_counts(8) == (3, 8)
    assert request.shard_counts(2) == (3, 6)
    assert VerifyRequest(spec=SPEC, workers=(1, 3), shards=5).shard_counts(8) == (5,)


def test_what_is_sent_in_half_precision_is_held_to_that() -> None:
    request = VerifyRequest(spec=SPEC, strategies=("ddp", "fsdp"), tuning={"compress": "bf16"})
    assert request.arithmetic(Candidate("ddp", 2), "fp32") == "sent as bf16"
    assert request.arithmetic(Candidate("fsdp", 2), "fp32") == "fp32"


def test_every_option_of_train_is_one_of_verify() -> None:
    def options(command: Callable[..., Any]) -> dict[str, Any]:
        found = inspect.signature(command).parameters.items()
        return {name.rstrip("_"): one.annotation for name, one in found}

    trained, verified = options(train), options(verify)
    assert trained.keys() - verified.keys() == {"roles", "on", "hosts", "ssh", "resources", "dry_run"}
    own = {"task", "strategy", "workers", "steps", "shards", "exact", "resume"}
    shared = trained.keys() & verified.keys() - own
    assert [name for name in shared if get_args(trained[name])[0] != get_args(verified[name])[0]] == []


def test_what_a_run_is_told_further_is_told_to_every_run() -> None:
    asked = VerifyRequest(
        spec=TrainSpec(task="digits", name="digits", steps=2), more={"hang_timeout": 9.0, "elastic": False}
    )
    for candidate in asked.candidates()[0]:
        made = asked.options(candidate)
        assert (made.hang_timeout, made.elastic) == (9.0, False)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"strategies": ()}, "nothing to verify"),
        ({"workers": (0,)}, "--workers is .*, but must be at least 1"),
        ({"strategies": ("dpd",)}, "Did you mean 'dp'"),
        ({"spec": TrainSpec(task="digits", name="digits")}, "--steps"),
    ],
)
def test_what_cannot_be_asked_for(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        VerifyRequest(**{"spec": SPEC, **changes})


def test_nothing_that_can_be_run() -> None:
    with pytest.raises(InputError, match="single x 2: single is one process"):
        VerifyRequest(spec=SPEC, strategies=("single",), workers=(2,)).candidates()


@pytest.mark.parametrize(
    ("promised", "found", "holds"),
    [
        ("bitwise", "bitwise", True),
        ("bitwise", "numeric", False),
        ("numeric", "bitwise", True),
        ("numeric", "numeric", True),
        ("numeric", "diverged", False),
        ("statistical", "statistical", True),
        ("statistical", "bitwise", True),
        ("statistical", "diverged", False),
        ("statistical", "unverified", False),
        ("statistical", "failed", False),
        ("bitwise", "refused", False),
        ("bitwise", "statistical", False),
        ("numeric", "statistical", False),
        ("", "skipped", True),
    ],
)
def test_when_a_promise_holds(promised: str, found: str, holds: bool) -> None:
    assert Row(strategy="ddp", workers=2, promised=promised, found=found).holds is holds
    assert not Row(strategy="ddp", workers=2, promised="bitwise", found="bitwise", lost=1).holds


def test_a_fault_fails_a_report_whose_rows_all_hold() -> None:
    row = Row(strategy="ddp", workers=2, promised="bitwise", found="bitwise", relative=math.inf)
    facts: dict[str, Any] = {
        "task": "t",
        "steps": 1,
        "shard_counts": (2,),
        "loss": 0.5,
        "bound": 1e-5,
        "rows": [row],
    }
    harmless = Finding(probe="p", cause="c", evidence="e", remedy="r", harmless=True)
    fault = Finding(probe="p", cause="c", evidence="e", remedy="r")
    assert TaskReport(**facts, findings=[harmless]).holds
    assert not TaskReport(**facts, findings=[harmless, fault]).holds
    assert (
        json.loads(json.dumps(TaskReport(**facts).as_json(), allow_nan=False))["rows"][0]["relative"] is None
    )


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        ([("ddp", "bitwise", "bitwise"), ("tp", "numeric", "numeric")], "every promise holds"),
        (
            [("ddp", "bitwise", "bitwise"), ("local-sgd", "statistical", "statistical")],
            "bitwise and numeric promises hold; local-sgd: compared by the loss curve alone, not verified to the bit",
        ),
        (
            [("local-sgd", "statistical", "statistical")] * 2,
            "local-sgd: compared by the loss curve alone, not verified to the bit",
        ),
        (
            [("local-sgd", "statistical", "bitwise")],
            "local-sgd: bitwise here, where the loss curve alone is promised",
        ),
    ],
)
def test_the_verdict_says_what_was_compared(found: list[tuple[str, str, str]], verdict: str) -> None:
    rows = [
        Row(strategy=strategy, workers=2, promised=promised, found=level)
        for strategy, promised, level in found
    ]
    report = TaskReport(task="t", steps=1, shard_counts=(2,), loss=0.5, bound=1e-5, rows=rows)
    assert report.verdict == verdict


def test_a_strategy_that_refuses_the_task_is_no_other_answer() -> None:
    held = Row(strategy="ddp", workers=2, promised="bitwise", found="bitwise", shards=2)
    refused = Row(
        strategy="pp", workers=2, promised="bitwise", found="refused", first="no row of layers", shards=2
    )
    report = TaskReport(
        task="t",
        steps=1,
        shard_counts=(2,),
        loss=0.5,
        bound=1e-5,
        rows=[held, refused, replace(held, shards=4), replace(refused, shards=4)],
        ruled_out=["a cause"],
    )
    stream = io.StringIO()
    Console(file=stream, width=120).print(report.render())
    told = stream.getvalue()
    assert not report.holds
    assert told.count("pp x 2 was refused: no row of layers") == 1
    assert "a cause" not in told
    assert "NOT verified" in told
