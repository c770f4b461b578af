"""Objects that a task and its modules hold: what a run changed of them is put back, and what cannot be is told of."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from paceline.task import Task
from paceline.training.attribute_changes import Then
from paceline.training.changed_attributes import ChangedAttributes
from paceline.world import alone
from tests.unit.training.test_saved_attributes import saved


@dataclass(frozen=True)
class Settings:
    """What a task and its model share."""

    scale: float = 1.0


class Counter:
    """Counts in a slot."""

    __slots__ = ("steps",)

    def __init__(self) -> None:
        self.steps = 0


@dataclass
class Schedule:
    """Holds another object."""

    rate: float = 1.0
    counter: Counter = field(default_factory=Counter)


class Loss(nn.Module):
    """A loss with a weight."""

    alpha = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.alpha = 1.0


class Net(nn.Module):
    """A model that was given a part of the settings."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.layer, self.options = nn.Linear(2, 2), options


def start() -> tuple[Any, Net, ChangedAttributes]:
    task: Any = Task()
    task.settings, task.schedule, task.criterion, task.space = (
        Settings(),
        Schedule(),
        Loss(),
        SimpleNamespace(w=1),
    )
    task.meters = {"loss": Schedule()}
    task.options = {"model": {"scale": [1.0]}, "rate": 1}
    task.rng, task.items, task.big = random.Random(1), iter([1, 2, 3]), torch.ones(5000)
    task.mixed = {"s": 1.0, "layer": nn.Identity, "object": object()}
    net = Net(task.options["model"])
    task.net = net
    changed = ChangedAttributes()
    changed.begin(net, task)
    return task, net, changed


def test_what_the_run_changed_of_objects_and_of_tables_in_tables_is_put_back() -> None:
    task, net, changed = start()
    assert changed.to_save(alone(), net, task, computes=True) is None
    task.settings = replace(task.settings, scale=0.5)
    task.schedule.rate, task.schedule.counter.steps, task.criterion.alpha, task.space.w = 0.1, 3, 0.2, 2
    task.meters["loss"].rate = 0.3
    task.options["model"]["scale"][0] = 0.5
    then = saved(changed, net, task)
    assert not (then.unsaved | then.used)
    task, net, changed = start()
    assert not changed.go_on(alone(), net, task, then, 3, computes=True)
    assert (task.settings.scale, task.schedule.rate, task.schedule.counter.steps) == (0.5, 0.1, 3)
    assert (task.criterion.alpha, task.space.w, task.meters["loss"].rate) == (0.2, 2, 0.3)
    assert net.options is task.options["model"]
    assert net.options == {"scale": [0.5]}
    assert not changed.after_step(net, task)
    assert saved(changed, net, task).changes.keys() == then.changes.keys()


def draw(task: Any) -> None:
    task.rng.random()


def take(task: Any) -> None:
    next(task.items)


def write(task: Any) -> None:
    task.mixed["s"] = 2.0


def enlarge(task: Any) -> None:
    task.big = torch.zeros(5000)


def drop(task: Any) -> None:
    del task.big


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (draw, "rng of the task was used or changed in the run"),
        (take, "items of the task was used or changed in the run"),
        (write, "mixed of the task was used or changed in the run"),
        (enlarge, "big of the task was set in the run to what no checkpoint holds"),
        (drop, "big of the task was set in the run to what no checkpoint holds"),
    ],
)
def test_what_cannot_be_put_back_is_told(change: Callable[[Any], None], text: str) -> None:
    task, net, changed = start()
    change(task)
    then = saved(changed, net, task)
    task, net, changed = start()
    told = changed.go_on(alone(), net, task, then, 3, computes=True)
    told += changed.after_step(net, task)
    assert [one[: len(text)] for one in told] == [text]


@pytest.mark.parametrize("back", [False, True])
def test_an_attribute_that_names_another_table_leaves_the_first_as_it_is(back: bool) -> None:
    def begin() -> tuple[Any, Net, ChangedAttributes]:
        task, net, _ = start()
        task.stages = [{"size": 1}, {"size": 2}]
        task.stage = task.stages[0]
        changed = ChangedAttributes()
        changed.begin(net, task)
        return task, net, changed

    task, net, changed = begin()
    task.stage = task.stages[1]
    if back:
        then = changed.now(net, task)
        task.stage = task.stages[0]
        changed.set_back(net, task, then, 3)
        assert (task.stage, task.stages) == ({"size": 2}, [{"size": 1}, {"size": 2}])
        changed.set_back(net, task, Then({}), 0)
        assert task.stage is task.stages[0]
    else:
        then = saved(changed, net, task)
        task, net, changed = begin()
        changed.go_on(alone(), net, task, then, 3, computes=True)
    assert task.stage == {"size": 1 + (not back)}
    assert task.stages == [{"size": 1}, {"size": 2}]
