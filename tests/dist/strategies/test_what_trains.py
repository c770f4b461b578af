"""Parameters that begin or cease to train while a run is in progress: as in one process, or refused in one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline
from paceline.strategies.tuning import Tuning
from tests.dist.strategies.scenarios import BATCH, Scenario, data, outcomes, same

EPOCHS = 2
Change = Callable[[int, nn.Module, torch.optim.Optimizer], None]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 3)

    def forward(self, features: Tensor) -> Tensor:
        scores: Tensor = self.head(self.norm(self.body(features).tanh()))
        return scores + self.more(features) if hasattr(self, "more") else scores


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def loop(run: paceline.Run, model: nn.Module, optimizer: torch.optim.Optimizer, change: Change) -> nn.Module:
    # One sample a shard is too few for statistics; their gradients are not what is looked at here.
    model.norm.eval()  # type: ignore[union-attr]
    model, optimizer = run.prepare(model, optimizer)
    for step in run.steps(data(), batch_size=BATCH, epochs=EPOCHS, max_grad_norm=0.5):
        change(step.number, model, optimizer)
        for features, labels in step:
            losses = F.cross_entropy(model(features), labels, reduction="none")
            step.backward(losses.sum(), len(losses))
        step.apply()
    return model


def unfrozen(run: paceline.Run) -> nn.Module:
    def change(number: int, model: nn.Module, _: torch.optim.Optimizer) -> None:
        model.body.requires_grad_(number >= 3)  # type: ignore[operator,union-attr]

    model = Net()
    model.body.requires_grad_(False)
    return loop(run, model, optimizer_of(model), change)


def frozen(run: paceline.Run) -> nn.Module:
    def change(number: int, model: nn.Module, _: torch.optim.Optimizer) -> None:
        model.body.requires_grad_(not 2 <= number < 6)  # type: ignore[operator,union-attr]

    model = Net()
    return loop(run, model, optimizer_of(model), change)


def added(run: paceline.Run) -> nn.Module:
    def change(number: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if number == 3:
            optimizer.add_param_group({"params": model.body.parameters(), "lr": 0.02})  # type: ignore[union-attr]

    model = Net()
    return loop(run, model, torch.optim.SGD(model.head.parameters(), lr=0.1, momentum=0.9), change)


def grown(run: paceline.Run) -> nn.Module:
    def change(number: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if number == 3:
            torch.manual_seed(3)
            model.more = nn.Linear(6, 3)
            optimizer.add_param_group({"params": model.more.parameters()})

    model = Net()
    return loop(run, model, optimizer_of(model), change)


def terms(run: paceline.Run) -> nn.Module:
    """A parameter that begins to train beside an auxiliary term."""
    model = Net()
    model.body.requires_grad_(False)
    model.norm.eval()
    prepared, _ = run.prepare(model, optimizer_of(model))
    for step in run.steps(data(), batch_size=BATCH, epochs=1):
        model.body.requires_grad_(step.number >= 2)
        for features, labels in step:
            scores = prepared(features)
            balance = paceline.Loss(scores.square().sum(), scores.numel())
            step.backward(
                paceline.Loss(F.cross_entropy(scores, labels, reduction="sum"), len(labels), {"b": balance})
            )
        step.apply()
    return prepared


def outside(run: paceline.Run) -> nn.Module:
    """A temperature and the weights of two terms, which no module has."""
    model, temperature, weights = Net(), nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.zeros(2))
    model.norm.eval()
    optimizer = torch.optim.AdamW([*model.parameters(), temperature, weights], lr=0.1)
    prepared, _ = run.prepare(model, optimizer)
    assert prepared is model
    for step in run.steps(data(), batch_size=BATCH, epochs=EPOCHS, max_grad_norm=0.5):
        for features, labels in step:
            scores = prepared(features) / temperature
            terms = torch.stack([F.cross_entropy(scores, labels, reduction="none"), scores.square().mean(1)])
            step.backward(((-weights).exp() @ terms + weights.sum()).sum(), len(labels))
        step.apply()
    assert temperature.item() != 1
    holder = Net()
    holder.learned = nn.ParameterList([temperature, weights])
    return holder


def of_another_module(run: paceline.Run) -> nn.Module:
    model, other = Net(), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    return loop(run, model, optimizer, lambda *_: None)


def in_the_middle(run: paceline.Run) -> nn.Module:
    model = Net()
    model.body.requires_grad_(False)
    model.norm.eval()
    prepared, _ = run.prepare(model, optimizer_of(model))
    for step in run.steps(data(), batch_size=BATCH, epochs=1):
        for features, labels in step:
            model.body.requires_grad_(step.number >= 2)
            losses = F.cross_entropy(prepared(features), labels, reduction="none")
            step.backward(losses.sum(), len(losses))
        step.apply()
    return prepared


def beside_torch(run: paceline.Run) -> nn.Module:
    """The same batches through torch alone: what it makes of an unfrozen parameter is what is meant."""
    model, plain = Net(), Net()
    plain.load_state_dict(model.state_dict())
    for one in (model, plain):
        one.body.requires_grad_(False)
        one.norm.eval()
    shadow = optimizer_of(plain)
    prepared, _ = run.prepare(model, optimizer_of(model))
    for step in run.steps(data(), batch_size=BATCH, epochs=EPOCHS, max_grad_norm=0.5):
        for one in (model, plain):
            one.body.requires_grad_(3 <= step.number < 6)
        shadow.zero_grad()
        for features, labels in step:
            losses = F.cross_entropy(prepared(features), labels, reduction="none")
            step.backward(losses.sum(), len(losses))
            F.cross_entropy(plain(features), labels).backward()
        step.apply()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        shadow.step()
        assert all(map(torch.equal, model.parameters(), plain.parameters())), step.number
    return prepared


EXACT: dict[str, tuple[Scenario, dict[str, Any]]] = {
    "unfrozen": (unfrozen, {}),
    "frozen": (frozen, {}),
    "added": (added, {}),
    "grown": (grown, {}),
    "terms": (terms, {}),
    "outside": (outside, {}),
}
REFUSED: dict[str, tuple[Scenario, dict[str, Any]]] = {
    "of_another_module": (of_another_module, {}),
    "in_the_middle": (in_the_middle, {}),
}


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return outcomes(EXACT | REFUSED, "single", 1, 4)


def test_one_process_trains_what_trains(alone: dict[str, Any]) -> None:
    paceline.launch(beside_torch, strategy="single", workers=1, shards=1, threads=1)
    for name in EXACT:
        assert not isinstance(alone[name], str), (name, alone[name])
    assert not same(alone["unfrozen"], alone["frozen"])
    assert "parameters of a Linear that is not in the model" in alone["of_another_module"]
    assert "body.weight began to train (requires_grad) in the middle of a step" in alone["in_the_middle"]


@pytest.mark.parametrize(("strategy", "workers"), [("dp", 2), ("ddp", 2), ("ddp", 3), ("ddp", 4)])
def test_what_begins_and_ceases_to_train(strategy: str, workers: int, alone: dict[str, Any]) -> None:
    scenarios = EXACT if workers > 2 else EXACT | REFUSED
    for name, outcome in outcomes(scenarios, strategy, workers, 4).items():
        assert same(outcome, alone[name]), (name, outcome, alone[name])


def test_a_sharded_optimizer_refuses_it() -> None:
    found = outcomes(
        {"unfrozen": (unfrozen, {}), "added": (added, {})}, "ddp", 2, 4, tuning=Tuning(shard_optimizer=True)
    )
    assert "body.weight began to train (requires_grad) after the model was prepared" in str(found["unfrozen"])
    assert "add_param_group" in str(found["added"])


def later(run: paceline.Run) -> None:
    """Frees a layer of which nothing trained, beside a batch: as a Task does in its loss."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    model[0].requires_grad_(False)
    made, _ = run.prepare(model, optimizer_of(model))
    for step in run.steps(data(), batch_size=BATCH, epochs=1):
        for features, labels in step:
            model[0].requires_grad_(step.number >= 2)
            losses = F.cross_entropy(made(features), labels, reduction="none")
            step.backward(losses.sum(), len(losses))
        step.apply()


@pytest.mark.parametrize("shards", [2, 4])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_layer_that_is_freed_in_the_middle_of_a_step_is_refused(strategy: str, shards: int) -> None:
    with pytest.raises(paceline.InputError, match="in the middle of a step"):
        paceline.launch(later, strategy=strategy, workers=2, shards=shards, threads=1)


def on_one_rank(run: paceline.Run) -> nn.Module:
    first = run.world.is_first

    def change(number: int, model: nn.Module, _: torch.optim.Optimizer) -> None:
        model.body.requires_grad_(first and number >= 2)  # type: ignore[operator,union-attr]

    model = Net()
    model.body.requires_grad_(False)
    return loop(run, model, optimizer_of(model), change)


def differently(run: paceline.Run) -> nn.Module:
    """New parameters whose values were drawn from another seed on each worker; the loop's own draws are alike."""

    def change(number: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if number == 3:
            torch.manual_seed(run.world.rank)
            model.more = nn.Linear(6, 3)
            optimizer.add_param_group({"params": model.more.parameters()})

    model = Net()
    return loop(run, model, optimizer_of(model), change)


def test_a_change_on_some_workers_only() -> None:
    with pytest.raises(
        paceline.InputError, match=r"body.weight began to train .*on rank 0, but not on rank 1"
    ):
        paceline.launch(on_one_rank, strategy="ddp", workers=2, shards=2, threads=1, hang_timeout=2)
    with pytest.raises(paceline.InputError, match=r"or with other values.*seed torch"):
        paceline.launch(differently, strategy="ddp", workers=2, shards=2, threads=1)
