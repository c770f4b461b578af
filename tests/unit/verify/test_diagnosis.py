"""Probes blame with evidence only, and clear the rest by name."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.verify.proof.differences import Difference
from paceline.verify.proof.evidence import ProofEvidence
from paceline.verify.proof.lab.experiments import operation
from paceline.verify.proof.lab.notes import SplitLosses
from paceline.verify.proof.probes.diagnosis import PROBES, diagnose
from tests.unit.verify.records import NAMES, attempt, notes, record, step


def evidence(**changes: Any) -> ProofEvidence:
    facts: dict[str, Any] = {
        "reference": record(),
        "broken": {},
        "failed": {},
        "notes": [notes(0), notes(1)],
        "again": notes(0),
        "hashed": None,
    }
    return ProofEvidence(**{**facts, **changes})


def named(**changes: Any) -> list[str]:
    return [finding.probe for finding in diagnose(evidence(**changes))[0]]


def test_a_divergence_without_a_cause_clears_everything_by_name() -> None:
    broken = {"ddp x 2": [record(0, (0,), [step(0, (0,), weights={})]), record(1, (1,))]}
    findings, cleared = diagnose(evidence(broken=broken))
    assert findings == []
    assert cleared == [name for name, _ in PROBES]


def test_one_answer_per_rank_that_each_process_makes_anew_is_not_blamed_on_the_rank() -> None:
    other = {0: attempt(totals=("0x1p+0",)), 1: attempt()}
    on_rank = {"notes": [notes(0), notes(1, attempts=other, repeated=other)]}
    assert named(**on_rank) == ["reads_rank"]
    assert named(**on_rank, again=notes(0, attempts=other, repeated=other)) == []


def test_another_loss_on_another_batch_is_not_blamed_on_the_model() -> None:
    other = {0: attempt(totals=("0x1p+0",)), 1: attempt()}
    second = notes(
        1,
        attempts=other,
        repeated=other,
        data={0: "z", 1: "y"},
        data_again={0: "z", 1: "y"},
        step_data={0: "z", 1: "y"},
    )
    assert named(notes=[notes(0), second]) == ["data_of_rank"]


def test_another_hash_seed_is_blamed_only_where_all_else_agrees() -> None:
    hashed = Difference(step=0, kind="data", name="of shard 0", rank=0)
    assert named(hashed=hashed) == ["hash_order"]
    assert named(hashed=hashed, notes=[notes(0, data_again={0: "z", 1: "y"})]) == ["unstable_items"]
    assert named(hashed=hashed, again=notes(0, made=dict.fromkeys(NAMES, "other"))) == ["initial_weights"]


def test_a_counter_that_the_answer_does_not_depend_on_is_left_alone() -> None:
    counting = {0: attempt(hidden=("early.calls",)), 1: attempt()}
    assert named(notes=[notes(0, attempts=counting, repeated=counting)]) == []


def test_samples_that_act_on_one_another_are_worth_knowing() -> None:
    parts = SplitLosses(whole_total=7.0, whole_weight=3.0, parts_total=6.0, parts_weight=3.0)
    (finding,) = diagnose(evidence(notes=[notes(0, parts=parts)]))[0]
    assert (finding.probe, finding.harmless) == ("interaction", True)


def test_a_buffer_is_blamed_only_where_the_forward_pass_was_the_same() -> None:
    buffers = {"early.count": "other"}
    same = [step(0, (1,), buffers=buffers)]
    other = [step(0, (1,), buffers=buffers, shard_losses={1: ("0x1p+9",)})]
    assert named(broken={"ddp x 2": [record(0, (0,)), record(1, (1,), same)]}) == ["buffers"]
    assert named(broken={"ddp x 2": [record(0, (0,)), record(1, (1,), other)]}) == []


@pytest.mark.parametrize(
    ("message", "name"),
    [
        (
            (
                "cumsum_cuda_kernel does not have a deterministic implementation, but you set "
                "'torch.use_deterministic_algorithms(True)'. You can turn off determinism"
            ),
            "cumsum_cuda_kernel",
        ),
        (
            (
                "Deterministic behavior was enabled with either `torch.use_deterministic_algorithms(True)` or ..., but this "
                "operation is not deterministic because it uses CuBLAS ... CUBLAS_WORKSPACE_CONFIG=:4096:8"
            ),
            "a matrix product in cuBLAS",
        ),
        ("mat1 and mat2 shapes cannot be multiplied", None),
    ],
)
def test_torch_s_complaints_about_kernels(message: str, name: str | None) -> None:
    assert operation(message) == name


def test_a_tensor_that_only_one_rank_has_is_named() -> None:
    more = {**dict.fromkeys(NAMES, "start"), "extra.weight": "start"}
    findings, _ = diagnose(evidence(notes=[notes(0), notes(1, made=more)]))
    assert [finding.probe for finding in findings] == ["initial_weights"]
    assert "extra.weight of rank 1" in findings[0].evidence
