"""Averages over workers of what is one number, and of what has 64 bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline import Loss
from paceline.training.run import engine_of

FEATURES = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))


class Scaled(nn.Module):
    """Has a parameter that is one number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 1), nn.Parameter(torch.ones(()))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.layer(values) * self.scale  # type: ignore[no-any-return]


def drift(run: paceline.Run) -> tuple[float, float]:
    """Return what Adam keeps for the number before and after workers come together."""
    torch.manual_seed(0)
    model = Scaled()
    model, optimizer = run.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01))
    for step in run.steps(TensorDataset(FEATURES), batch_size=8, steps=3):
        step.compute(lambda made, batch: Loss.mean(made(batch[0]).square().flatten()))
    before = float(optimizer.state[model.scale]["exp_avg"])
    engine_of(run).state.replica.synchronize()
    return before, float(optimizer.state[model.scale]["exp_avg"])


def test_momentum_of_a_single_number_is_averaged() -> None:
    (one, first), (other, second) = paceline.launch(
        drift, workers=2, strategy="local-sgd", local_steps=100, shards=2, threads=1, device="cpu"
    )
    assert one != other
    assert first == second == pytest.approx((one + other) / 2, rel=1e-6)


def normalised(run: paceline.Run) -> float:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in run.steps(TensorDataset(FEATURES.double()), batch_size=8, steps=2):
        result = step.compute(lambda made, batch: Loss.mean(made(batch[0]).square().flatten()))
    return result.loss


def test_batch_statistics_of_64_bits_keep_them() -> None:
    (alone,) = paceline.launch(normalised, strategy="single", shards=1, threads=1, device="cpu")
    for found in paceline.launch(
        normalised, workers=2, strategy="ddp", sync_batchnorm=True, shards=2, threads=1, device="cpu"
    ):
        assert found == pytest.approx(alone, rel=1e-13)


class Waves(nn.Module):
    """Has complex parameters, one of them a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.polar(torch.ones(4), torch.arange(4.0)))
        self.turn = nn.Parameter(torch.tensor(0.5 + 0.5j))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return ((values * self.weight).sum(1) * self.turn + 1j).abs()


Slots = dict[tuple[str, str], torch.Tensor]


def drift_in_the_plane(run: paceline.Run) -> tuple[Slots, Slots]:
    """Return what Adam keeps for complex parameters before and after workers come together."""
    model = Waves()
    adam = torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True)
    model, optimizer = run.prepare(model, adam)
    for step in run.steps(TensorDataset(FEATURES), batch_size=8, steps=3):
        step.compute(lambda made, batch: Loss.mean(made(batch[0]).square()))

    def kept() -> Slots:
        return {
            (name, slot): value.clone()
            for name, parameter in model.named_parameters()
            for slot, value in optimizer.state[parameter].items()
        }

    before = kept()
    engine_of(run).state.replica.synchronize()
    return before, kept()


def test_momentum_of_complex_parameters_is_averaged() -> None:
    (one, first), (other, second) = paceline.launch(
        drift_in_the_plane,
        workers=2,
        strategy="local-sgd",
        local_steps=100,
        shards=2,
        threads=1,
        device="cpu",
    )
    assert one["weight", "exp_avg"].imag.abs().min() > 0
    assert one["turn", "exp_avg"].imag != 0
    for key, value in first.items():
        assert torch.equal(value, second[key])
        assert torch.allclose(value, (one[key] + other[key]) / 2, rtol=1e-6)
        assert key[1] == "step" or not torch.equal(one[key], other[key])
