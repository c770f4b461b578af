"""The same bits on any number of workers: weights, buffers, optimizer, losses, norms. No hash is written down here."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist.bitwise.training import Case, train

CASES = [
    Case(task="Pictures", shards=4, optimizer="momentum", max_grad_norm=0.5),
    Case(task="Pictures", shards=5, optimizer="adamw", batch_size=13),
    Case(task="Pictures", shards=8, optimizer="adafactor", micro_batch=2),
    Case(task="Sentences", shards=3, optimizer="adamw", micro_batch=4),
    Case(task="Sentences", shards=8, optimizer="adafactor", max_grad_norm=0.1),
    Case(task="Sentences", shards=4, optimizer="adamw", precision="bf16"),
    Case(task="Sequences", shards=4, optimizer="adafactor", batch_size=13),
    Case(task="Sequences", shards=5, optimizer="momentum", max_grad_norm=0.2),
    Case(task="Tied", shards=3, optimizer="momentum", max_grad_norm=0.1),
    Case(task="Tied", shards=8, optimizer="adamw", precision="bf16", micro_batch=1),
]
WAYS: list[dict[str, Any]] = [
    {"strategy": "ddp", "workers": 1},
    {"strategy": "ddp", "workers": 2},
    {"strategy": "ddp", "workers": 2, "transport": "gloo"},
    {"strategy": "ddp", "workers": 3},
    {"strategy": "ddp", "workers": 3, "transport": "gloo"},
    {"strategy": "ddp", "workers": 4},
    {"strategy": "dp", "workers": 2},
    {"strategy": "dp", "workers": 3},
]


@pytest.fixture(scope="module")
def alone() -> dict[Case, dict[str, Any]]:
    """What one process computes."""
    return dict(zip(CASES, train(CASES, strategy="single", shards=8), strict=True))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(str, way.values())))
def test_any_number_of_workers_gives_the_bits_of_one(
    way: dict[str, Any], alone: dict[Case, dict[str, Any]]
) -> None:
    possible = [case for case in CASES if case.shards >= way["workers"]]
    for case, found in zip(possible, train(possible, shards=8, **way), strict=True):
        assert found == alone[case], case


def test_the_bits_do_depend_on_what_they_should(alone: dict[Case, dict[str, Any]]) -> None:
    hashes = [found["weights"] for found in alone.values()]
    assert len(set(hashes)) == len(hashes)


def test_a_run_repeated_gives_its_bits_again(alone: dict[Case, dict[str, Any]]) -> None:
    again = train(CASES[:2], strategy="single", shards=8)
    assert again == [alone[case] for case in CASES[:2]]
