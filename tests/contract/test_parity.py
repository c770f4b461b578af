"""The trained weights are those of one process, on data that divides and on data that does not."""

from __future__ import annotations

import pytest
import torch

from tests.contract.conftest import Compared
from tests.contract.distance import assert_same, bound, distance
from tests.contract.jobs import FEW, JOBS, STEPS, Job
from tests.contract.strategies import SHARDS
from tests.contract.tasks import ADAM_EPSILON, LEARNING_RATE, MOMENTUM
from tests.contract.training import Trained, train

ADAM_GAIN = LEARNING_RATE / ADAM_EPSILON
GAINS = {
    "adamw": ADAM_GAIN,
    "momentum": LEARNING_RATE / (1 - MOMENTUM),
    "uneven": ADAM_GAIN,
    "short": ADAM_GAIN,
    "tiny": ADAM_GAIN,
    "micro": ADAM_GAIN,
}


@pytest.mark.parametrize("job", GAINS)
def test_weights_at_the_end(compared: Compared, job: str) -> None:
    one, many = compared.one[job], compared.many[job]
    additions = JOBS[job].batch_size or 8
    assert_same(compared.case, one.weights, many.weights, bound(additions, JOBS[job].steps, gain=GAINS[job]))
    assert (one.result["weights_sha256"] == many.result["weights_sha256"]) or not compared.case.bitwise


def test_what_a_run_says_of_itself(compared: Compared) -> None:
    result = compared.many["adamw"].result
    assert result["exactness"] == compared.case.level
    assert (result["strategy"], result["workers"]) == (compared.case.strategy, compared.case.workers)
    assert (result["steps"], result["shards"]) == (STEPS, SHARDS)


@pytest.mark.parametrize(
    ("job", "samples"),
    [
        ("uneven", 61 + 61 + 2 * 7),  # two epochs of 9 steps, and two steps more
        ("short", 2 * 18 + 2 * 8),  # epochs of 3 steps: 8, 8 and 2 samples
        ("tiny", FEW * 3),
    ],
)
def test_no_sample_is_dropped_or_padded(compared: Compared, job: str, samples: int) -> None:
    assert compared.many[job].result["samples"] == samples


def test_two_ddp_workers_of_one_shard_are_one_process_to_the_bit() -> None:
    jobs = {
        name: Job(settings=job.settings, options={"shards": 2}) for name, job in JOBS.items() if name in GAINS
    }
    jobs["auxiliary"] = Job(task="Balanced", options={"shards": 2})
    one, two = train(jobs), train(jobs, "ddp", 2)
    for name in jobs:
        left, right = one[name].weights, two[name].weights
        assert all(torch.equal(left[key], right[key]) for key in left), name
        assert one[name].result["weights_sha256"] == two[name].result["weights_sha256"]


def test_the_bound_notices_one_lost_sample(one: dict[str, Trained]) -> None:
    fewer = train({"fewer": Job(settings={"samples": "60"}, batch_size=7)})["fewer"]
    assert distance(one["uneven"].weights, fewer.weights) > 100 * bound(7, STEPS, gain=ADAM_GAIN)
