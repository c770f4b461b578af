"""The first difference is the earliest cause, and samples are counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paceline.verify.proof.differences import count_samples, first_difference
from tests.unit.verify.records import NAMES, record, step


def workers(**changes: Any) -> list[Any]:
    """Give two workers of one shard each; the changes are made to step 1 of the second."""
    second = [step(number, (1,), **(changes if number == 1 else {})) for number in range(3)]
    return [record(0, (0,)), record(1, (1,), second)]


def test_the_same_bits() -> None:
    assert first_difference(record(), workers()) is None
    assert count_samples(record(), workers()) == (0, 0)


@pytest.mark.parametrize(
    ("changes", "kind", "name"),
    [
        ({"samples": {1: (1, 2)}, "data": {1: "other"}}, "samples", "of shard 1"),
        ({"data": {1: "other"}, "shard_losses": {1: ("0x1p+1",)}}, "data", "of shard 1"),
        ({"shard_losses": {1: ("0x1p+1",)}, "gradients": {}}, "loss", "of shard 1 (2 not 1.5)"),
        ({"gradients": dict.fromkeys(NAMES, "other"), "loss": 2.0}, "gradient", "early.weight"),
        ({"loss": 2.0, "rates": (0.2,)}, "loss", "of the global batch (2 not 1.5)"),
        ({"rates": (0.2,), "weights": {}}, "learning rate", "0.2 not 0.1"),
        ({"weights": {**dict.fromkeys(NAMES, "weight 1"), "late.weight": "other"}}, "weight", "late.weight"),
        ({"optimizer": {}}, "optimizer state", "early.weight: momentum"),
        ({"buffers": {"early.count": "other"}}, "buffer", "early.count"),
    ],
)
def test_the_cause_comes_before_its_effects(changes: dict[str, Any], kind: str, name: str) -> None:
    found = first_difference(record(), workers(**changes))
    assert found is not None
    assert (found.step, found.rank, found.kind, found.name) == (1, 1, kind, name)


def test_other_weights_at_the_start() -> None:
    first, second = workers()
    found = first_difference(
        record(), [first, replace(second, start={**second.start, "late.weight": "other"})]
    )
    assert found is not None
    assert (found.kind, found.name, found.rank) == ("starting weight", "late.weight", 1)


def test_a_shard_that_nobody_carried() -> None:
    found = first_difference(record(), [record(0, (0,))])
    assert found is not None
    assert (found.kind, found.name) == ("samples", "of shard 1 (missing)")
    assert count_samples(record(), [record(0, (0,))]) == (6, 0)


def test_a_run_that_ends_early_or_late() -> None:
    short = record(0, (0, 1), [step(0)])
    early, late = first_difference(record(), [short]), first_difference(short, [record()])
    assert early is not None
    assert late is not None
    assert (early.step, late.step) == (1, 1)


def test_a_sample_served_twice() -> None:
    again = {1: (*step(1).samples[1], step(1).samples[0][0])}
    assert count_samples(record(), workers(samples=again)) == (0, 1)
