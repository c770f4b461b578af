"""A loop that does itself what is done for it is told so, in the first step in which it does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from paceline.errors import InputError
from tests.unit.training.own_runs import data, losses, opened, prepared


def loop(habit: str, **options: Any) -> torch.Tensor:  # noqa: C901 - one line for each habit
    """Train with one habit of a plain loop left in."""
    with opened(shards=2, micro_batch=2, **options) as run:
        model: Any = nn.Linear(4, 1)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        schedule = StepLR(optimizer, 2)
        model, optimizer = run.prepare(model, optimizer, scheduler=schedule)
        norms: list[float] = []
        scaler = torch.amp.GradScaler("cpu")
        for step in run.steps(data(), batch_size=8, epochs=1):
            if habit == "zero_grad outside":
                optimizer.zero_grad()
            kept = []
            for batch in step:
                if habit == "zero_grad":
                    optimizer.zero_grad()
                if habit == "model.zero_grad" and batch is not None:
                    model.zero_grad()
                found = losses(model, batch)
                if habit == "term":
                    (0.1 * model.weight.square().sum()).backward()
                if habit == "kept":
                    kept.append(found)
                else:
                    step.backward(found)
                if habit == "late term" and step.number == 2:
                    (0.1 * model.weight.square().sum()).backward()
                if habit == "scaled inside":
                    model.bias.grad.mul_(0.1)
            if habit == "clip_grad_norm_":
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            if habit == "clip of a part":
                nn.utils.clip_grad_norm_([model.weight], 100.0)
            if habit == "clip_grad_value_":
                nn.utils.clip_grad_value_(model.parameters(), 0.5)
            if habit == "scaled":
                model.weight.grad = 0.1 * model.weight.grad
            if habit == "term behind":
                (0.1 * model.weight.square().sum()).backward()
            if habit == "model.zero_grad before apply":
                model.zero_grad()
            if habit == "reads":
                norms.append(float(torch.stack([one.grad.norm() for one in model.parameters()]).norm()))
                if step.number:
                    torch.autograd.grad(model(torch.ones(1, 4)).sum(), model.weight)
            for each in kept:
                step.backward(each)
            if habit == "twice":
                for batch in step:
                    step.backward(losses(model, batch))
            if habit == "zero_grad before apply":
                optimizer.zero_grad()
            result = step.apply(max_grad_norm=1e9 if habit == "reads" else None)
            if habit == "reads":
                assert result.norm == pytest.approx(norms[-1], rel=1e-5)
                model(
                    torch.ones(1, 4)
                ).sum().backward()  # gradients of nobody's: the next step begins without
            if habit == "optimizer.step":
                optimizer.step()
            if habit == "scaler.step":
                scaler.scale(torch.zeros(()))
                scaler.step(optimizer)
            if habit == "scheduler.step":
                schedule.step()
            if habit == "zero_grad outside":
                optimizer.zero_grad()
        if habit == "optimizer.step behind":
            optimizer.step()
        return model.weight.detach()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("habit", "words"),
    [
        ("optimizer.step", r"step\.apply\(\) was called before"),
        ("optimizer.step behind", r"called optimizer\.step\(\) outside of a step"),
        ("scaler.step", r"step\.apply\(\) was called before"),
        ("scheduler.step", r"called scheduler.step\(\) itself"),
        ("zero_grad", r"optimizer.zero_grad\(\) in the middle of a step"),
        ("zero_grad before apply", r"optimizer.zero_grad\(\) in the middle of a step"),
        ("model.zero_grad", "cleared gradients inside"),
        ("term", r"called backward\(\) itself"),
        ("late term", r"called backward\(\) itself"),
        ("scaled inside", "or changed gradients"),
        *(
            (habit, r"changed gradients before step.apply\(\).*max_grad_norm=")
            for habit in (
                "clip_grad_norm_",
                "clip of a part",
                "clip_grad_value_",
                "scaled",
                "term behind",
                "model.zero_grad before apply",
            )
        ),
        ("kept", "outside of `for batch in step`"),
        ("twice", "a second time"),
    ],
)
def test_a_habit_is_named(habit: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        loop(habit)


def test_gradients_may_be_read_where_they_are_sums() -> None:
    assert torch.equal(loop("reads"), loop("none"))


def test_gradients_may_be_cleared_between_steps() -> None:
    assert torch.equal(loop("zero_grad outside"), loop("none"))


def test_an_optimizer_that_is_nobody_elses_may_step() -> None:
    with opened() as run:
        model, _ = prepared(run)
        own = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
        for step in run.steps(data(), batch_size=8, steps=1):
            for batch in step:
                own(torch.ones(1, 1)).sum().backward()
                step.backward(losses(model, batch))
            step.apply()
            optimizer.step()
            optimizer.zero_grad()
