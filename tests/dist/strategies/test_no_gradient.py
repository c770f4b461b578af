"""A parameter without a gradient stays as it is, weight decay and momentum included, on any number of workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline
from paceline import Loss
from paceline.strategies.tuning import Tuning
from tests.dist.strategies.scenarios import BATCH, Scenario, data, outcomes, same


class Experts(nn.Module):
    """A gate and three experts; the data says which one is used, and the last one never is."""

    def __init__(self, wide: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 2)
        self.experts = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))
        self.wide = nn.Parameter(torch.ones(3, dtype=wide))

    def forward(self, features: Tensor) -> Tensor:
        scores: Tensor = self.experts[int(features[0, 0] > 0)](features)
        return scores * (self.wide.abs() if self.wide.is_complex() else self.wide)


def loop(run: paceline.Run, model: nn.Module, loss: Callable[[nn.Module, Tensor, Tensor], Loss]) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.3)
    model, _ = run.prepare(model, optimizer)
    for step in run.steps(data(), batch_size=BATCH, epochs=2, max_grad_norm=0.5):
        for features, labels in step:
            step.backward(loss(model, features, labels))
        step.apply()
    return model


def plain(model: nn.Module, features: Tensor, labels: Tensor) -> Loss:
    return Loss.mean(F.cross_entropy(model(features), labels, reduction="none"))


def balanced(model: nn.Module, features: Tensor, labels: Tensor) -> Loss:
    """The gate is reached by the balance alone; an expert that nobody chose by nothing."""
    losses = F.cross_entropy(model(features), labels, reduction="none")
    gates: Tensor = model.gate(features)  # type: ignore[operator]
    return Loss.mean(losses, balance=Loss(gates.square().sum(), (gates > 0).sum() + 0.5))


def twice(model: nn.Module, features: Tensor, labels: Tensor) -> Loss:
    """Two terms, one of which reaches an expert that the main one does not."""
    made = balanced(model, features, labels)
    other: Tensor = model.experts[int(features[0, 1] > 0)](features)  # type: ignore[index]
    return Loss(made.total, made.weight, {**made.auxiliary, "other": Loss(other.abs().sum(), len(labels))})


def quiet(model: nn.Module, features: Tensor, labels: Tensor) -> Loss:
    """A term with nothing to say in some batches."""
    scores = model(features)
    says = features[0, 0] > 0
    term = Loss(scores.square().sum(), len(labels)) if says else Loss(0 * scores.sum(), 0)
    return Loss.mean(F.cross_entropy(scores, labels, reduction="none"), size=term)


def now_and_then(run: paceline.Run) -> nn.Module:
    return loop(run, nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), quiet)


def constant(model: nn.Module, features: Tensor, labels: Tensor) -> Loss:
    """A term that is a constant in some batches."""
    made = quiet(model, features, labels)
    says = features[0, 0] > 0
    return made if says else Loss(made.total, made.weight, {"size": Loss(torch.zeros(()), 0)})


def here_and_there(run: paceline.Run) -> nn.Module:
    return loop(run, nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), constant)


def branching(run: paceline.Run) -> nn.Module:
    return loop(run, Experts(), plain)


def gated(run: paceline.Run) -> nn.Module:
    return loop(run, Experts(), balanced)


def both(run: paceline.Run) -> nn.Module:
    return loop(run, Experts(torch.float64), twice)


def mixed(run: paceline.Run) -> nn.Module:
    return loop(run, Experts(torch.float64), plain)


def complex_branching(run: paceline.Run) -> nn.Module:
    return loop(run, Experts(torch.complex64), balanced)


class Wave(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.randn(6, 3, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, features: Tensor) -> Tensor:
        return (features.to(torch.complex64) @ self.phase).abs() * self.scale


def waves(run: paceline.Run) -> nn.Module:
    return loop(run, Wave(), plain)


class Gated(nn.Module):
    def __init__(self, spare: bool = False) -> None:
        super().__init__()
        self.gate, self.head = nn.Linear(6, 2), nn.Linear(6, 3)
        if spare:
            self.spare = nn.Linear(2, 2)

    def forward(self, features: Tensor) -> Tensor:
        scores: Tensor = self.head(features)
        return scores


def announced_by_none(run: paceline.Run) -> nn.Module:
    """The gate is reached by the auxiliary term alone, and nobody set find_unused_parameters."""
    return loop(run, Gated(), balanced)


def thawed(run: paceline.Run) -> nn.Module:
    """The gate begins to train later, by the auxiliary term alone."""
    model: nn.Module = Gated()
    model.gate.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.3)
    model, _ = run.prepare(model, optimizer)
    for step in run.steps(data(), batch_size=BATCH, epochs=2, max_grad_norm=0.5):
        if step.number == 2:
            model.gate.requires_grad_(True)
        for features, labels in step:
            losses = F.cross_entropy(model(features), labels, reduction="none")
            scale = model.gate(features).square().sum() * model.head.weight.square().mean()
            step.backward(Loss.mean(losses, balance=Loss(scale, len(labels))))
        step.apply()
    return model


def spare(run: paceline.Run) -> nn.Module:
    return loop(run, Gated(spare=True), balanced)


UNUSED = {"find_unused_parameters": True}
EXACT: dict[str, tuple[Scenario, dict[str, Any]]] = {
    "branching": (branching, UNUSED),
    "gated": (gated, UNUSED),
    "both": (both, UNUSED),
    "mixed": (mixed, UNUSED),
    "complex_branching": (complex_branching, UNUSED),
    "waves": (waves, {}),
    "announced_by_none": (announced_by_none, {}),
    "now and then": (now_and_then, {}),
    "here and there": (here_and_there, {}),
    "in parts": (announced_by_none, {"micro_batch": 1}),
    "both in parts": (both, UNUSED | {"micro_batch": 1}),
}
REPLICAS = EXACT | {"thawed": (thawed, {})}
CUT = {name: EXACT[name] for name in ("now and then",)}


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    found = outcomes(REPLICAS, "single", 1, 4)
    assert not [outcome for outcome in found.values() if isinstance(outcome, str)]
    return found


@pytest.mark.parametrize(
    ("scenarios", "strategy", "workers", "options"),
    [
        (REPLICAS, "dp", 2, {}),
        (REPLICAS, "ddp", 2, {}),
        (REPLICAS, "ddp", 3, {"transport": "gloo"}),
        (REPLICAS, "ddp", 4, {}),
        (EXACT, "ddp", 2, {"tuning": Tuning(shard_optimizer=True)}),
        (CUT, "fsdp", 2, {}),
    ],
)
def test_no_gradient_is_not_a_gradient_of_zero(
    scenarios: dict[str, tuple[Scenario, dict[str, Any]]],
    strategy: str,
    workers: int,
    options: dict[str, Any],
    alone: dict[str, Any],
) -> None:
    found = outcomes(scenarios, strategy, workers, 4, **options)
    assert [name for name, outcome in found.items() if not same(outcome, alone[name])] == [], found


def test_a_term_that_skips_the_model_is_refused_where_others_would_wait_for_it() -> None:
    with pytest.raises(
        paceline.InputError, match=r"term size depends on nothing that is trained in this batch"
    ):
        paceline.launch(here_and_there, strategy="fsdp", workers=2, shards=2, threads=1)


def test_what_no_term_reaches_is_named() -> None:
    with pytest.raises(paceline.InputError, match=r"no gradient for spare\.weight.*find_unused_parameters"):
        paceline.launch(spare, strategy="ddp", workers=2, shards=2, threads=1)
