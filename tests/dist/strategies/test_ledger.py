"""Losses and weights are added up in 64 bits where the model has them, and never in fewer than 32 by torch's default."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline import Loss

FEATURES = torch.randn(22, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
BATCH, RATE = 8, 0.1


def model_of(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)


def fractional(model: nn.Module, batch: list[Tensor]) -> Loss:
    """Weights that no 32 bits hold, losses beyond what 32 bits reach, and a term with a weight of its own."""
    scores, weights = model(batch[0]), batch[0][:, 0].abs() + 0.1
    size = Loss(1e60 * scores.square().sum(), 0.3 * weights.sum())
    return Loss(1e60 * (scores.sum(1).exp() * weights).sum(), weights.sum(), {"size": size})


def train(run: paceline.Run) -> tuple[list[float], str]:
    """Take an epoch of three steps, in 64 bits."""
    model = model_of(torch.float64)
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=RATE * 1e-60))
    steps = run.steps(TensorDataset(FEATURES), batch_size=BATCH, epochs=1)
    losses = [step.compute(fractional).loss for step in steps]
    return losses, run.weights_sha256()


def by_hand(run: paceline.Run) -> list[float]:
    """Return the losses of the same steps without paceline's own."""
    model, losses = model_of(torch.float64), []
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE * 1e-60)
    for data in run.loader(TensorDataset(FEATURES), batch_size=BATCH).epoch(0):
        (rows,) = (torch.cat(one) for one in zip(*(b for s in data.shards for b in s.batches), strict=True))
        loss = fractional(model, [rows])
        mean = loss.total / loss.weight + loss.auxiliary["size"].total / loss.auxiliary["size"].weight
        optimizer.zero_grad()
        mean.backward()
        optimizer.step()
        losses.append(float(mean))
    return losses


def launched(function: Any, *arguments: Any, strategy: str, workers: int, **options: Any) -> Any:
    return paceline.launch(
        function, *arguments, strategy=strategy, workers=workers, threads=1, device="cpu", **options
    )


@pytest.fixture(scope="module")
def single() -> tuple[list[float], str]:
    ((losses, weights),) = launched(train, strategy="single", workers=1, shards=4)
    return losses, weights


def test_weights_and_losses_of_64_bits_are_not_rounded_to_32(single: tuple[list[float], str]) -> None:
    (wanted,) = launched(by_hand, strategy="single", workers=1, shards=4)
    # The last one stands on three updates: with weights of 32 bits it was off by 1e-8.
    assert single[0] == pytest.approx(wanted, rel=1e-14, abs=0)


@pytest.mark.parametrize("strategy", ["dp", "ddp", "fsdp", "pp", "ps"])
def test_they_are_the_same_bits_on_any_worker(strategy: str, single: tuple[list[float], str]) -> None:
    for found in launched(train, strategy=strategy, workers=2, shards=4):
        assert tuple(found) == single


def count(run: paceline.Run, default: torch.dtype) -> tuple[float, float, str]:
    """Take one step over many tokens, with torch's default type set as whoever makes a large model may leave it."""
    model = model_of(torch.float32)
    torch.set_default_dtype(default)
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=RATE))
    for step in run.steps(TensorDataset(FEATURES.float()), batch_size=22, steps=1):
        for (rows,) in step:
            tokens = (rows[:, 0].abs() * 1e5).long() + 1
            size = Loss(model(rows).square().sum(), tokens.sum())
            step.backward(Loss((model(rows).sum(1) * tokens).sum(), tokens.sum(), {"size": size}))
        result = step.apply(max_grad_norm=1e3)
    return result.loss, result.weight, run.weights_sha256()


@pytest.mark.parametrize(("strategy", "workers"), [("single", 1), ("ddp", 2), ("fsdp", 2), ("ps", 2)])
def test_the_default_type_does_not_round_them(strategy: str, workers: int) -> None:
    how: dict[str, Any] = {"strategy": strategy, "workers": workers, "shards": 2}
    plain = launched(count, torch.float32, **how)
    assert plain[0][1] == float(((FEATURES[:, 0].float().abs() * 1e5).long() + 1).sum())
    for default in (torch.bfloat16, torch.float16):
        assert launched(count, default, **how) == plain
