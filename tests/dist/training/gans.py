"""A small GAN with batch normalisation, dropout, a buffer of its own, two optimizers and two schedules, in a loop of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline
from paceline.data import Batches
from paceline.world import fault_points
from tests.fault.survivors import set_off

SHARDS = 3
TURNS = ("discriminator", "generator")


class Generator(nn.Module):
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, noise: Tensor) -> Tensor:
        self.calls.add_(1)
        made: Tensor = self.net(noise)
        return made


def discriminator() -> nn.Module:
    first = nn.utils.parametrizations.spectral_norm(nn.Linear(2, 16))
    return nn.Sequential(first, nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(16, 1))


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def _momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1)


def _halved(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)


def parts(*, given: bool) -> tuple[Any, Any, Any]:
    """Return models, optimizers and schedules, or functions that make them."""
    models: dict[str, Any] = {"generator": Generator, "discriminator": discriminator}
    optimizers: dict[str, Any] = {"generator": _adam, "discriminator": _momentum}
    schedules: dict[str, Any] = {"generator": _halved}
    if not given:
        return models, optimizers, schedules
    torch.manual_seed(3)
    models = {name: make() for name, make in models.items()}
    optimizers = {name: make(models[name]) for name, make in optimizers.items()}
    return models, optimizers, {"generator": _halved(optimizers["generator"])}


def judged(scores: Tensor, as_real: float) -> Tensor:
    return F.binary_cross_entropy_with_logits(
        scores.squeeze(1), torch.full((len(scores),), as_real), reduction="none"
    )


SIZES = (12, 7, 12, 9)


def uneven(seed: int, epoch: int) -> Batches:
    """Return an order of batches that are smaller in the middle of an epoch."""
    order = np.random.default_rng((seed, epoch)).permutation(44)[: sum(SIZES)]
    return Batches.of(np.split(order, np.cumsum(SIZES)[:-1]))


def train(
    run: paceline.Run,
    *,
    given: bool = True,
    freezes: bool = False,
    ordered: bool = False,
    epochs: int = 3,
    steps: int | None = None,
    folder: str = "",
    faults: Any = (),
) -> Any:
    data = TensorDataset(torch.randn(44, 2, generator=torch.Generator().manual_seed(2)) + 3)
    models, optimizers, schedules = parts(given=given)
    models, optimizers = run.prepare(models, optimizers, scheduler=schedules)
    generate, judge = models["generator"], models["discriminator"]
    if faults:
        fault_points.set_fault(lambda point: set_off(run, folder, faults, point))
    seen = []
    for step in run.steps(
        data,
        batch_size=12,
        turns=TURNS,
        order=uneven if ordered else None,
        max_grad_norm=1.0,
        steps=steps,
        epochs=None if steps else epochs,
    ):
        if freezes:  # as many loops do, so that the other model's gradients are not computed
            for name, model in models.items():
                model.requires_grad_(name == step.turn)
        for (real,) in step:
            made = generate(torch.randn(len(real), 4))
            if step.turn == "discriminator":
                scores = judge(made.detach())
                losses = judged(judge(real), 1.0) + judged(scores, 0.0)
            else:
                scores = judge(made)
                losses = judged(scores, 1.0)
            calm = paceline.Loss.mean(0.1 * scores.squeeze(1).square())
            step.backward(paceline.Loss.mean(losses, calm=calm))
        if ordered:
            optimizers[step.turn].step()  # as plain loops have it
        else:
            step.apply()
        if not step.again:
            seen.append((step.turn, step.result.loss))
    fault_points.set_fault(None)
    rates = {name: one.param_groups[0]["lr"] for name, one in optimizers.items()}
    return run.weights_sha256(), seen, rates, [one["reason"] for one in run._engine.state.recoveries]
