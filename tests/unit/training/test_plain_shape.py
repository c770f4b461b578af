"""A loop that keeps the shape of a plain one: prepared by kind, an epoch a pass, optimizer.step() and a schedule of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader

from paceline import Mean, Run
from paceline.errors import InputError
from tests.unit.training.own_runs import data, losses, opened, resumed

EPOCHS = 3


def made() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    torch.manual_seed(3)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, optimizer, DataLoader(data(20), batch_size=8, shuffle=True)


def long(run: Run, epochs: int = EPOCHS) -> str:
    """Train as run.steps has it: one call, the schedule stepped by the run."""
    model, optimizer, loader = made()
    schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer = run.prepare(model, optimizer, scheduler=schedule)
    for step in run.steps(loader, epochs=epochs):
        for batch in step:
            step.backward(losses(model, batch))
        step.apply()
    return run.weights_sha256()


def short(run: Run, epochs: int = EPOCHS, stops_in: int | None = None) -> str:
    """Train in the shape of a plain loop."""
    model, optimizer, loader = made()
    schedule: Any = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader, schedule, model, optimizer = run.prepare(loader, schedule, model, optimizer)
    assert len(loader) == 3
    assert loader.batch_size == 8
    for epoch in range(epochs):
        for step in loader:
            optimizer.zero_grad()
            for batch in step:
                step.backward(losses(model, batch))
            optimizer.step()
            schedule.step()
            if step.number == stops_in:
                run.stop()
        if stops_in is not None and step.number == stops_in:
            break
        del epoch
    run._engine.calls.finish()
    return run.weights_sha256()


def test_the_shape_changes_no_bit(tmp_path: Path) -> None:
    with opened(shards=2) as run:
        one = long(run)
    with opened(shards=2) as run:
        assert short(run) == one
    with opened(shards=2, out=tmp_path) as run:
        short(run, stops_in=4)  # in the middle of the second epoch
    assert (tmp_path / "checkpoints" / "step-5").is_dir()
    with resumed(tmp_path, shards=2) as run:
        assert short(run) == one


def plateau(run: Run, epochs: int) -> tuple[list[float], str]:
    model, optimizer, loader = made()
    model, optimizer, loader, schedule = run.prepare(
        model, optimizer, loader, lambda made: ReduceLROnPlateau(made, factor=0.5, patience=0, threshold=0.5)
    )
    rates = []
    for _ in range(epochs):
        for step in loader:
            for batch in step:
                step.backward(losses(model, batch))
            step.apply()
        found = run.evaluate(
            data(8), lambda model, batch: {"error": Mean(losses(model, batch).sum(), len(batch[0]))}
        )
        schedule.step(found["error"])
        rates.append(optimizer.param_groups[0]["lr"])
    run._engine.calls.finish()
    return rates, run.weights_sha256()


def test_a_plateau_is_fed_with_a_metric_and_resumed(tmp_path: Path) -> None:
    with opened() as run:
        rates, weights = plateau(run, 5)
    assert min(rates) < 0.05
    with opened(out=tmp_path) as run:
        plateau(run, 2)
    with resumed(tmp_path) as run:
        again, found = plateau(run, 5)
    assert found == weights
    assert again == rates


def test_a_schedule_that_nobody_steps_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    told: list[Any] = []
    with opened() as run:
        run._engine.state.emit = told.append
        model, optimizer, loader = made()
        model, optimizer, _ = run.prepare(model, optimizer, StepLR(optimizer, 1))
        for step in run.steps(loader, epochs=1):
            for batch in step:
                step.backward(losses(model, batch))
            step.apply()
        run._engine.calls.finish()
    assert any(
        "StepLR that run.prepare returned was never stepped" in getattr(one, "text", "") for one in told
    )


def test_what_cannot_be_told_apart_is_refused() -> None:
    model, optimizer, _ = made()
    schedule = StepLR(optimizer, 1)
    other = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    for given, options, words in (
        ((model, model, optimizer), {}, "given 2 models. Give several models and optimizers under names"),
        ((model, optimizer, schedule, schedule), {}, r"2 schedulers. Give one, and keep .* run.register\("),
        ((model,), {}, "given no optimizer"),
        ((model, optimizer, 3), {}, "given a int, which is no model"),
        ((model, optimizer, schedule), {"scheduler": schedule}, "two schedules"),
        ((model, optimizer, StepLR(other, 1)), {}, "belongs to another optimizer"),
    ):
        with opened() as run, pytest.raises(InputError, match=words):
            run.prepare(*given, **options)


def test_the_step_of_an_optimizer_in_the_wrong_place_is_refused() -> None:
    for place, words in (("inside", "had gone through all its batches"), ("twice", "was called before")):
        with opened() as run, pytest.raises(InputError, match=words):
            step_at(run, place)


@pytest.mark.parametrize("how", ["pair", "counted", "begins", "key"])
def test_a_step_in_the_place_of_a_batch_is_refused_with_the_right_loop(how: str) -> None:
    with opened(shards=2) as run, pytest.raises(InputError, match="in it `for x, y in step:`"):
        use_steps_as_batches(run, how)


def use_steps_as_batches(run: Run, how: str) -> None:
    """Do so where a step has two batches, which is what a batch is unpacked into."""
    model, _, loader = run.prepare(*made())
    for step in loader:
        assert len([*step]) == 2
        break
    if how == "pair":
        for features, targets in loader:
            losses(model, [features, targets])
    elif how == "counted":
        for _, (features, targets) in enumerate(loader):
            losses(model, [features, targets])
    elif how == "begins":
        for step in loader:
            features, *_ = step
    else:
        for step in loader:
            model(step[0])


def step_at(run: Run, place: str) -> None:
    model, optimizer, loader = run.prepare(*made())
    for step in loader:
        for batch in step:
            step.backward(losses(model, batch))
            if place == "inside":
                optimizer.step()
        optimizer.step()
        optimizer.step()
