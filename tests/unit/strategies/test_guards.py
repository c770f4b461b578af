"""What every strategy refuses before the first step, in one line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from paceline.errors import InputError
from paceline.strategies.guards import before_first_step as guards
from paceline.strategies.guards.schedules import step_schedule


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)


def test_an_optimizer_that_computes_the_loss_itself() -> None:
    class Odd(torch.optim.SGD):
        def step(self, losses: Any) -> None:  # type: ignore[override]
            """Need what nobody gives."""

    guards.check_optimizer(torch.optim.LBFGS(nn.Linear(2, 2).parameters()))
    with pytest.raises(InputError, match=r"Odd\.step needs 'losses'"):
        guards.check_optimizer(Odd(nn.Linear(2, 2).parameters()))
    with pytest.raises(InputError, match=r"is a Linear, not a torch\.optim\.Optimizer"):
        guards.check_optimizer(nn.Linear(2, 2))


def test_every_optimizer_of_torch_that_works_from_gradients_passes() -> None:
    made = 0
    for name in dir(torch.optim):
        kind = getattr(torch.optim, name)
        if (
            isinstance(kind, type)
            and issubclass(kind, torch.optim.Optimizer)
            and name not in ("Optimizer", "LBFGS")
        ):
            found = kind([nn.Parameter(torch.zeros(2, 2))], lr=0.1)
            lr_scheduler.LambdaLR(found, lambda _: 1.0)  # wraps its step
            guards.check_optimizer(found)
            made += 1
    assert made > 10


class Timm:
    """A schedule as timm has them: counted in epochs by the loop."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self, epoch: int, metric: float | None = None) -> None:
        raise NotImplementedError


def test_schedules_that_step_alone_does_not_move() -> None:
    held = optimizer()
    with pytest.raises(InputError, match=r"ReduceLROnPlateau\.step needs 'metrics'"):
        guards.check_scheduler(lr_scheduler.ReduceLROnPlateau(held), held)
    with pytest.raises(InputError, match=r"Timm\.step needs 'epoch'"):
        guards.check_scheduler(Timm(held), held)
    with pytest.raises(InputError, match=r"is a list, which has no step"):
        guards.check_scheduler([], held)
    with pytest.raises(InputError, match=r"belongs to another optimizer"):
        guards.check_scheduler(lr_scheduler.StepLR(optimizer(), 1), held)


def test_schedules_of_torch_that_count_steps_pass() -> None:
    held = optimizer()
    constant = lr_scheduler.ConstantLR(held)
    for schedule in (
        None,
        constant,
        lr_scheduler.OneCycleLR(held, 0.1, total_steps=10),
        lr_scheduler.SequentialLR(held, [constant, lr_scheduler.StepLR(held, 1)], [3]),
        lr_scheduler.ChainedScheduler([constant], held),
    ):
        guards.check_scheduler(schedule, held)


def test_a_sequence_that_torch_cannot_step_is_refused_before_it_comes_there() -> None:
    held = optimizer()
    first, then, last = (lr_scheduler.ConstantLR(held) for _ in range(3))
    chained = lr_scheduler.ChainedScheduler([then, last])
    with pytest.raises(InputError, match=r"goes on to a ChainedScheduler, which torch .* cannot begin"):
        guards.check_scheduler(lr_scheduler.SequentialLR(held, [first, chained], [3]), held)
    inner = lr_scheduler.SequentialLR(held, [then, last], [2])
    with pytest.raises(InputError, match="goes on to a SequentialLR"):
        guards.check_scheduler(lr_scheduler.SequentialLR(held, [first, inner], [3]), held)


def test_a_schedule_that_fails_in_torch_says_so_in_one_line_and_one_of_the_users_with_its_own_error() -> None:
    held = optimizer()
    without_end = lr_scheduler.CosineAnnealingLR(held, None)  # type: ignore[arg-type]
    held.step()
    with pytest.raises(InputError, match=r"CosineAnnealingLR\.step\(\) failed .*\(TypeError: .*NoneType"):
        step_schedule(without_end)
    mine = lr_scheduler.LambdaLR(held, lambda step: 1 / (1 - step))
    with pytest.raises(ZeroDivisionError):
        step_schedule(mine)


def test_hooks_that_see_a_part_of_a_gradient() -> None:
    layer = nn.Linear(2, 2)
    layer.weight.register_hook(lambda gradient: gradient)
    guards.check_hooks(layer.named_parameters())
    assert guards.has_hooks(layer.weight)
    assert not guards.has_hooks(layer.bias)
    layer.bias.register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(InputError, match=r"^bias has a hook of register_post_accumulate_grad_hook"):
        guards.check_hooks(layer.named_parameters())
