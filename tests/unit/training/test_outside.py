"""Parameters that the optimizer has and the model has not, in this process: trained, measured with, saved and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline import Loss, Mean, Run
from paceline.errors import InputError
from tests.unit.training.own_runs import data, opened, resumed

BATCH = 8


def parts() -> tuple[nn.Module, nn.Parameter, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model, scale = (
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)),
        nn.Parameter(torch.ones(())),
    )
    return (
        model,
        scale,
        torch.optim.AdamW([{"params": model.parameters()}, {"params": [scale], "lr": 0.1}], lr=0.05),
    )


def losses(made: Tensor, targets: Tensor, scale: Tensor) -> Tensor:
    return ((made - targets).square() * (-scale).exp() + scale).flatten()


def train(run: Run, steps: int, **options: Any) -> tuple[str, float, float]:
    """Return the weights, the scale, and an error that is measured with the loop's own model."""
    model, scale, optimizer = parts()
    names = [name for name, _ in model.named_parameters()]
    prepared, optimizer = run.prepare(model, optimizer, **options)
    assert prepared is model
    assert [name for name, _ in prepared.named_parameters()] == names
    for step in run.steps(data(), batch_size=BATCH, steps=steps):
        if step.number % 2:
            step.compute(
                lambda model, batch: Loss.mean(losses(model[2](model[:2](batch[0])), batch[1], scale))
            )
        else:
            for features, targets in step:
                step.backward(losses(prepared(features), targets, scale))
            step.apply()
    run._engine.calls.finish()
    found = run.evaluate(data(), lambda model, batch: {"error": Mean(model[2](model[:2](batch[0])).sum(), 1)})
    outputs = run.predict(data(), lambda model, batch: model[0](batch[0]))
    assert torch.equal(outputs, prepared[0](data().tensors[0]).detach())  # type: ignore[index,operator]
    return run.weights_sha256(), scale.item(), found["error"]


def test_they_are_trained_measured_with_saved_and_resumed(tmp_path: Path) -> None:
    with opened(shards=2) as run:
        whole = train(run, 6)
    assert whole[1] != 1
    with opened(shards=2, out=tmp_path) as run:
        assert train(run, 3)[1] != whole[1]
    with resumed(tmp_path, shards=2) as run:
        assert train(run, 6) == whole


def test_they_take_the_steps_of_plain_torch() -> None:
    model, scale, optimizer = parts()
    with opened(shards=1) as run:
        mine, own, made = parts()
        run.prepare(mine, made)
        for step in run.steps(data(), batch_size=BATCH, steps=4):
            optimizer.zero_grad()
            for features, targets in step:
                step.backward(losses(mine(features), targets, own))
                losses(model(features), targets, scale).sum().div(len(targets)).backward()
            step.apply()
            optimizer.step()
    assert scale.item() == pytest.approx(own.item(), rel=1e-6)


def test_rules_for_buffers_go_by_the_names_of_the_model() -> None:
    with opened(shards=2) as run:
        plain = train(run, 2)
    with opened(shards=2) as run:
        assert train(run, 2, buffers={"1.running_mean": "mean"}) == plain
    with opened(shards=2) as run, pytest.raises(InputError, match=r"2\.running_mean"):
        train(run, 2, buffers={"2.running_mean": "mean"})


@pytest.mark.parametrize("options", [{"strategy": name} for name in ("fsdp", "tp", "pp", "local-sgd")])
def test_what_replaces_parameters_refuses_them(options: dict[str, Any]) -> None:
    model, _, optimizer = parts()
    with (
        opened(**options) as run,
        pytest.raises(InputError, match=r"shape \(\) that the model has not, and --strategy"),
    ):
        run.prepare(model, optimizer)


def test_those_of_a_module_and_bare_tensors_are_refused() -> None:
    model, forgotten = nn.Linear(4, 1), nn.Sequential(nn.PReLU(), nn.BatchNorm1d(1, affine=False))
    for extra, words in (
        ([*forgotten.parameters()], "parameters of a PReLU that is not in the model"),
        ([torch.ones(2, requires_grad=True)], r"tensor of shape \(2,\) that is no nn.Parameter"),
    ):
        optimizer = torch.optim.SGD([*model.parameters(), *extra], lr=0.1)
        with opened() as run, pytest.raises(InputError, match=words):
            run.prepare(model, optimizer)
    with opened() as run:
        optimizer = torch.optim.SGD([*model.parameters(), *forgotten.parameters()], lr=0.1)
        models, _ = run.prepare({"model": model, "other": forgotten}, {"all": optimizer})
        assert models["other"] is forgotten


@pytest.mark.parametrize("first", [0, 1])
def test_the_module_that_is_named_is_the_first_of_the_optimizer(first: int) -> None:
    model, others = nn.Linear(4, 1), [nn.PReLU(), nn.BatchNorm1d(1)]
    held = [one for module in (others[first], others[1 - first]) for one in module.parameters()]
    optimizer = torch.optim.SGD([*model.parameters(), *held], lr=0.1)
    with (
        opened() as run,
        pytest.raises(InputError, match=f"parameters of a {type(others[first]).__name__} that"),
    ):
        run.prepare(model, optimizer)
