"""--sync-batchnorm: the statistics of the whole global batch, as one process computes them on the batch in one piece."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from paceline import InputError, Loss, Run, launch

STEPS = 6
BOUND = 2e-5
"""Sums of 24 x 16 float32 numbers rounded in another order, eps 6e-8 each, through six steps of momentum SGD."""


def train(run: Run) -> dict[str, Tensor]:
    """Train a small CNN and give its state."""
    made = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randn(72, 1, 6, 6, generator=made), torch.randint(3, (72,), generator=made))
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3), nn.BatchNorm1d(3)
    )

    def loss(model: nn.Module, batch: Any) -> Loss:
        return Loss.mean(F.cross_entropy(model(batch[0]), batch[1], reduction="none"))

    replica = run.prepare_replica(
        model, lambda made: torch.optim.SGD(made.parameters(), lr=0.05, momentum=0.9)
    )
    for step in run.steps(data, batch_size=24, steps=STEPS):
        step.compute(loss)
    assert run.exactness == ("numeric" if run.options.sync_batchnorm else "bitwise")
    return replica.state()["model"]


@pytest.mark.parametrize("workers", [2, 3])
def test_many_workers_normalise_as_one(workers: int) -> None:
    (whole,) = launch(train, strategy="single", threads=1, device="cpu")
    states = launch(train, workers=workers, sync_batchnorm=True, threads=1, device="cpu")
    (apart,) = launch(train, strategy="single", shards=workers, threads=1, device="cpu")
    assert list(states[0]) == list(whole)
    for name, value in whole.items():
        assert torch.allclose(states[0][name].double(), value.double(), rtol=BOUND, atol=BOUND), name
        assert all(torch.equal(other[name], states[0][name]) for other in states[1:])
    assert not torch.allclose(apart["1.running_var"], whole["1.running_var"], rtol=10 * BOUND)


def test_it_promises_no_more_than_numeric() -> None:
    with pytest.raises(InputError, match="bitwise is more than"):
        launch(train, workers=2, sync_batchnorm=True, exact="bitwise", device="cpu")


def test_it_refuses_several_shards_a_worker() -> None:
    with pytest.raises(InputError, match="4 shards for 2 workers"):
        launch(train, workers=2, shards=4, sync_batchnorm=True, device="cpu")
