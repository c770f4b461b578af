"""--sync-batchnorm: the statistics of the whole global batch, as one process computes them on the batch in one piece."""

from __future__ import annotations

import os
import signal
from pathlib import Path
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


def train(run: Run, batch_size: int = 24, killed: str | None = None) -> dict[str, Tensor]:
    """Train a small CNN and give its state; the worker of rank 1 dies once, where `killed` names the file that says so."""
    made = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randn(72, 1, 6, 6, generator=made), torch.randint(3, (72,), generator=made))
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3), nn.BatchNorm1d(3)
    )
    model.append(model[5])  # one layer, called twice

    def loss(model: nn.Module, batch: Any) -> Loss:
        return Loss.mean(F.cross_entropy(model(batch[0]), batch[1], reduction="none"))

    replica = run._engine.preparation.prepare_replica(
        model, lambda made: torch.optim.SGD(made.parameters(), lr=0.05, momentum=0.9)
    )
    for step in run.steps(data, batch_size=batch_size, steps=STEPS):
        if killed is not None and run.world.rank == 1 and step.number == 3 and not Path(killed).exists():
            Path(killed).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        step.compute(loss)
    assert run._engine.state.exactness == (
        "numeric" if run._engine.state.options.sync_batchnorm else "bitwise"
    )
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


def test_a_lost_worker_is_waited_for_because_each_must_carry_one_shard(tmp_path: Path) -> None:
    (whole,) = launch(train, strategy="single", threads=1, device="cpu")
    killed = str(tmp_path / "killed")
    states = launch(train, 24, killed, workers=2, sync_batchnorm=True, threads=1, device="cpu")
    assert len(states) == 2
    for name, value in whole.items():
        assert torch.allclose(states[0][name].double(), value.double(), rtol=BOUND, atol=BOUND), name


def test_it_promises_no_more_than_numeric() -> None:
    with pytest.raises(InputError, match="bitwise' is more than"):
        launch(train, workers=2, sync_batchnorm=True, exact="bitwise", device="cpu")


def test_it_refuses_several_shards_a_worker() -> None:
    with pytest.raises(InputError, match="4 shards for 2 workers"):
        launch(train, workers=2, shards=4, sync_batchnorm=True, device="cpu")


def far_from_zero(run: Run) -> float:
    """Normalise numbers whose mean is large and whose spread is small; give the worst error against torch."""
    values = 1000 + 0.01 * torch.randn(64, 3, generator=torch.Generator().manual_seed(1))
    whole = nn.BatchNorm1d(3)(values.double().float())
    model = nn.Sequential(nn.BatchNorm1d(3))
    run._engine.preparation.prepare_replica(model, lambda made: torch.optim.SGD(made.parameters(), lr=0.1))
    half = slice(32 * run.world.rank, 32 * (run.world.rank + 1))
    return float((model(values[half]) - whole[half]).abs().max())


def test_a_small_variance_far_from_zero_survives() -> None:
    # Numbers near 1000 are rounded to 6e-5, a hundredth of their spread, in either way of computing.
    assert max(launch(far_from_zero, workers=2, sync_batchnorm=True, threads=1, device="cpu")) < 0.05


def test_it_refuses_a_batch_that_leaves_a_worker_without_samples() -> None:
    with pytest.raises(InputError, match="sync_batchnorm=True needs a sample on each of 5 workers"):
        launch(train, workers=5, shards=5, sync_batchnorm=True, device="cpu", kwargs={"batch_size": 34})


def test_it_refuses_micro_batches() -> None:
    with pytest.raises(InputError, match="micro_batch= cannot cut it"):
        launch(train, workers=2, sync_batchnorm=True, micro_batch=4, device="cpu")
