"""The fused update, and when a captured one may be replayed. The capture itself needs a GPU (tests/gpu)."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from paceline.strategies import fused_update
from paceline.strategies.fused_update import FusedUpdate


class NoGraph:
    """Stands for a captured update, which has no GPU to be replayed on."""

    def replay(self) -> None: ...


class OnCpu(FusedUpdate):
    """torch has a fused kernel there, too."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer, torch.device("cpu"), self.hear)
        self._fuses = True
        self.heard: list[str] = []

    def hear(self, text: str) -> None:
        self.heard.append(text)

    def _is_free(self, group: dict[str, Any]) -> bool:
        return isinstance(group["lr"], float)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Count captures, and have them do nothing."""
    made: list[object] = []

    def capture(graph: object, **_: Any) -> AbstractContextManager[None]:
        made.append(graph)
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "CUDAGraph", NoGraph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(fused_update, "step_without_hooks", lambda _: None)
    return made


def made() -> tuple[nn.Linear, AdamW, OnCpu]:
    model = nn.Linear(2, 1)
    optimizer = AdamW(model.parameters(), lr=0.1)
    give_gradients(model)
    optimizer.step()
    return model, optimizer, OnCpu(optimizer)


def give_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)


def test_a_rate_that_a_hook_on_the_step_sets_stays() -> None:
    _, optimizer, update = made()

    def decay(stepped: Optimizer, *_: Any) -> None:
        for group in stepped.param_groups:
            group["lr"] *= 0.5

    update.step()
    assert optimizer.param_groups[0]["lr"] == 0.1
    optimizer.register_step_post_hook(decay)
    update.step()
    update.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)
    assert optimizer.param_groups[0]["fused"] is None


def another_moment(_: nn.Linear, optimizer: Optimizer) -> None:
    for entry in optimizer.state.values():
        entry["exp_avg"] = torch.zeros_like(entry["exp_avg"])


def other_memory(model: nn.Linear, _: Optimizer) -> None:
    model.weight.data = model.weight.data.clone()


def other_gradients(model: nn.Linear, _: Optimizer) -> None:
    give_gradients(model)


def other_betas(_: nn.Linear, optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["betas"] = (0.5, 0.999)


CHANGES = [another_moment, other_memory, other_gradients, other_betas]


@pytest.mark.parametrize("change", CHANGES, ids=lambda one: one.__name__)
def test_a_captured_update_is_replayed_only_over_what_it_was_captured_with(
    change: Callable[[nn.Linear, Optimizer], None], captures: list[object]
) -> None:
    model, optimizer, update = made()
    update.step(static=True)
    optimizer.param_groups[0]["lr"] = 0.05  # it is read anew
    update.step(static=True)
    assert len(captures) == 1
    change(model, optimizer)
    update.step(static=True)
    assert len(captures) == 2


def test_what_a_captured_update_reads_is_kept_until_it_is_forgotten(captures: list[object]) -> None:
    model, _, update = made()  # else others may come to lie where it lay, and be taken for it
    update.step(static=True)
    gradient = weakref.ref(model.weight.grad)
    model.zero_grad()
    assert gradient() is not None
    update.forget()
    assert gradient() is None
    assert len(captures) == 1


def test_options_that_change_in_every_step_are_not_captured_again_and_again(captures: list[object]) -> None:
    _, optimizer, update = made()
    for number in range(50):
        optimizer.param_groups[0]["betas"] = (0.9 - 0.001 * number, 0.999)
        update.step(static=True)
    assert len(captures) < 10
    assert len(update.heard) == 1


def test_a_step_of_the_users_own_is_called(captures: list[object]) -> None:
    _, optimizer, update = made()
    LambdaLR(optimizer, lambda _: 1.0)  # wraps the step, which stays what it is
    update.step(static=True)
    assert len(captures) == 1
    before, called = optimizer.step, []

    def step(*arguments: Any) -> Any:
        called.append(True)
        return before(*arguments)

    optimizer.step = step  # type: ignore[method-assign, assignment]
    update.step(static=True)
    assert called == [True]
