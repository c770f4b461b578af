"""Evaluation adds up rows of (step, shard, batch) in one order, whatever order they came in."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from paceline.declared import Collected
from paceline.errors import InputError
from paceline.strategies.base import Rows
from paceline.task import Mean
from paceline.training.evaluation import combine
from paceline.world import Identity, connect
from tests.unit.training.own_runs import data, opened, prepared

WORLD = connect(Identity(rank=0, size=1, local_rank=0, local_size=1), device="cpu")


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.integers(1, 9)), min_size=1, max_size=30), st.randoms())
def test_the_order_of_rows_does_not_matter(values: list[tuple[float, int]], source: random.Random) -> None:
    rows: Rows = {(place // 4, place % 4, 0): {"m": Mean(*value)} for place, value in enumerate(values)}
    shuffled = list(rows.items())
    source.shuffle(shuffled)
    assert combine(dict(shuffled), WORLD) == combine(rows, WORLD)


def test_means_of_sums_and_weights() -> None:
    rows: Rows = {
        (0, 0, 0): {"accuracy": Mean(torch.tensor(3), 4), "loss": Mean(1.5, torch.tensor(2.0))},
        (0, 1, 0): {"accuracy": Mean(1, torch.tensor(1))},
        (1, 0, 0): {"loss": Mean(torch.tensor(0.5), 2)},
    }
    assert combine(rows, WORLD) == {"accuracy": 4 / 5, "loss": 0.5}
    assert combine({}, WORLD) == {}


def test_what_is_no_number_is_told_apart() -> None:
    found = combine({(0, 0, 0): {"recall": Mean(0, 0), "loss": Mean(1.0, 2)}}, WORLD)
    assert math.isnan(found["recall"])
    assert found["loss"] == 0.5


@pytest.mark.parametrize("part", ["total", "weight"])
@pytest.mark.parametrize(
    ("given", "words"),
    [
        (1j, "is 1j"),
        (torch.tensor(1 + 0j), "is of the type torch.complex64"),
        (None, "is None"),
        ([1.0], r"is \[1.0\]"),
        (np.ones(3), r"has the shape \(3,\)"),
        ("3", "is the text '3'"),
        (10**400, "is larger than any floating-point number"),
    ],
)
def test_what_is_no_number_is_no_part_of_a_mean(part: str, given: Any, words: str) -> None:
    value = Mean(**{"total": 1.0, "weight": 1, part: given})
    with opened() as run:
        prepared(run)
        with pytest.raises(
            InputError, match=rf"^the {part} of the metric right {words}; it must be one number"
        ):
            run.evaluate(data(), lambda model, batch: {"right": value})


@pytest.mark.parametrize("value", [Mean(torch.ones(3), 3), Mean(1.0, torch.ones(2))])
def test_a_metric_is_one_number(value: Mean) -> None:
    with opened() as run:
        prepared(run)
        with pytest.raises(InputError, match=r"of the metric right has the shape"):
            run.evaluate(data(), lambda model, batch: {"right": value})


def test_what_takes_gradients_is_told_that_there_are_none() -> None:
    def penalty(model: Any, batch: Any) -> dict[str, Mean]:
        inputs = batch[0].clone().requires_grad_()
        (made,) = torch.autograd.grad(model(inputs).sum(), inputs)
        return {"penalty": Mean(made.square().sum(), len(made))}

    with opened() as run:
        prepared(run)
        with pytest.raises(
            InputError, match=r"evaluations run without them.* loss\(\).*torch\.enable_grad\(\)"
        ):
            run.evaluate(data(), penalty)
        assert run.evaluate(data(), torch.enable_grad()(penalty))["penalty"] > 0


class Kept:
    """Keeps the outputs that it is given, as a metric with a list of them does."""

    def __init__(self, outputs: list[torch.Tensor]) -> None:
        self.outputs = outputs

    def merge(self, other: Kept) -> None:
        self.outputs += other.outputs

    def compute(self) -> torch.Tensor:
        return torch.cat(self.outputs).sum()


def test_what_is_measured_may_share_memory_from_batch_to_batch() -> None:
    held = torch.zeros(24, 1)
    count = torch.zeros(())

    def outputs(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        return held[: len(batch[0])].copy_(model(batch[0]))

    def metrics(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, Any]:
        made = outputs(model, batch)
        return {
            "sum": Mean(count.zero_().add_(made.sum()), 1),
            "all": Collected(made, compute=lambda every: every.sum()),
            "kept": Kept([made]),
        }

    with opened(shards=2) as run, torch.no_grad():
        model, _ = prepared(run)
        wanted = model(data().tensors[0])
        assert torch.equal(run.predict(data(), outputs, batch_size=8), wanted)
        found = run.evaluate(data(), metrics, batch_size=8)
    assert found["all"] == pytest.approx(float(wanted.sum()), rel=1e-5)
    assert found["kept"] == pytest.approx(float(wanted.sum()), rel=1e-5)
    assert found["sum"] * 6 == pytest.approx(float(wanted.sum()), rel=1e-5)


def test_a_model_that_is_parallel_already_is_refused() -> None:
    model = nn.DataParallel(nn.Linear(4, 1))
    with opened() as run, pytest.raises(InputError, match=r"a DataParallel, which combines gradients itself"):
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
