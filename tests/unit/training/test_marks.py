"""Marks tell whether something was written to, and states are weighed as they are now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from paceline.strategies.guards.places import Places
from paceline.training.user_loop.loop_state import LoopState
from paceline.training.user_loop.marks import ModuleMarks, StateMarks, slot_marks


class Made(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 2), nn.BatchNorm1d(2))
        self.register_buffer("scale", torch.ones(2))


def replace_scale(model: Any) -> None:
    model.scale = model.scale * 0.5


CHANGES: list[Callable[[Any], Any]] = [
    lambda model: model[0].weight.mul_(2.0),
    lambda model: model[0].weight[0].zero_(),
    lambda model: model[1].running_mean.add_(1.0),
    replace_scale,
    lambda model: model[0].register_buffer("late", torch.ones(1)),
    lambda model: model.append(nn.Linear(2, 2)),
    lambda model: setattr(model[0], "child", nn.Tanh()),
]


@pytest.mark.parametrize("change", CHANGES)
def test_marks_of_a_module_see_writes_and_replacements(change: Callable[[Any], Any]) -> None:
    model = Made()
    marks = ModuleMarks(model)
    before = marks.note()
    assert marks.note() == before
    with torch.no_grad():
        change(model)
    assert marks.note() != before
    assert marks.note() == marks.note()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_marks_and_places_of_a_scripted_module_see_writes() -> None:
    model = torch.jit.script(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    marks, places = ModuleMarks(model), Places(model)
    before = marks.note()
    places.check()
    assert marks.note() == before
    with torch.no_grad():
        next(model.parameters()).mul_(2.0)
    assert marks.note() != before
    places.check()


def test_marks_of_slots_see_writes_replacements_and_what_is_cleared() -> None:
    model = Made()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    slots: Any = list(optimizer.state.values())
    marks = [slot_marks(optimizer)]
    assert slot_marks(optimizer) == marks[0]
    slots[0]["exp_avg"].mul_(0.5)
    marks.append(slot_marks(optimizer))
    slots[0]["exp_avg"] = slots[0]["exp_avg"] * 0.5
    marks.append(slot_marks(optimizer))
    slots[0]["notes"] = [1]
    marks.append(slot_marks(optimizer))
    slots[0]["notes"].append(2)
    marks.append(slot_marks(optimizer))
    optimizer.state.clear()
    marks.append(slot_marks(optimizer))
    assert all(one != other for place, one in enumerate(marks) for other in marks[:place])


def test_marks_of_a_state_see_its_numbers_too() -> None:
    state: dict[str, Any] = {"tensor": torch.zeros(3), "numbers": [1.0, {"a": (1, 2)}]}
    before = StateMarks(state, anew=False)
    assert StateMarks(state, anew=False) == before
    state["numbers"][1]["a"] = (1, 3)
    between = StateMarks(state, anew=False)
    assert between != before
    state["tensor"].add_(1)
    assert StateMarks(state, anew=False) != between
    copied = StateMarks({"tensor": state["tensor"].clone()}, anew=True)
    assert copied == StateMarks({"tensor": state["tensor"].clone()}, anew=True)


def test_a_state_that_has_grown_is_copied_no_more_and_marked_instead() -> None:
    registered, best = LoopState(), {"score": 0.0}
    registered.register("best", best)
    assert registered.small_now() == {"best": {"score": 0.0}}
    assert not registered.large_marks()
    best["weights"] = torch.zeros(5_000)  # type: ignore[assignment]
    assert registered.small_now() == {}
    assert list(registered.large_marks()) == ["best"]
