"""Objects that a task and its modules hold: what a run changed of them is put back, and what cannot be is told of."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from paceline.task import Task
from paceline.training import attribute_owners
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


class Average:
    """Keeps a moving average of weights, too many of them for a checkpoint's table."""

    def __init__(self) -> None:
        self.shadow = {"w": torch.zeros(40, 40)}


def told(change: Callable[[Any], None], first: Callable[[Any], None] = lambda _: None) -> set[str]:
    """Return what a start is told of that goes on behind a change of the second step; `first` is done in each first step."""
    task, net, changed = start()
    task.average, task.layer, task.long, task.many, task.cache = (
        Average(),
        nn.BatchNorm1d(2000),
        np.zeros(5000),
        [0.5] * 999,
        {},
    )
    changed = ChangedAttributes()
    changed.begin(net, task)
    first(task)
    changed.after_passes(net, task)
    assert not changed.after_step(net, task)
    change(task)
    task.options["rate"] = 2
    found = saved(changed, net, task)
    return {f"{attribute} of {name}" for name, attribute in found.used}


def count_in_a_new_object(task: Any) -> None:
    task.lazy = Schedule()


CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "a large average": (lambda task: task.average.shadow["w"].add_(1), "shadow of average of the task"),
    "a layer beside the model": (lambda task: task.layer.running_mean.add_(1), "layer of the task"),
    "a large array": (lambda task: task.long.__iadd__(1), "long of the task"),
    "a large tensor": (lambda task: task.big.mul_(2), "big of the task"),
    "a list that has grown long": (lambda task: task.many.extend([1.0, 2.0]), "many of the task"),
    "an object in a table": (lambda task: task.cache.update(n=1, o=object()), "cache of the task"),
    "an object of the first step": (lambda task: setattr(task.lazy, "rate", 0.5), "lazy of the task"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_is_too_large_or_too_deep_to_be_held_is_told_of(what: str) -> None:
    change, name = CHANGES[what]
    assert told(change, count_in_a_new_object) == {name}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "first", [lambda _: None, lambda task: task.cache.update({3: torch.ones(3000)}), count_in_a_new_object]
)
def test_what_was_not_written_to_is_not_told_of(first: Callable[[Any], None]) -> None:
    assert not told(lambda task: task.net.layer.weight.data.add_(1), first)


def test_what_a_state_of_the_users_own_holds_is_not_told_of() -> None:
    task, net, changed = start()
    task.average = Average()
    changed = ChangedAttributes()
    changed.begin(net, task)
    task.average.shadow["w"].add_(1)
    task.big.mul_(2)
    task.rng.random()
    registered = [task.average, task.rng, {"big": task.big}]
    entry = changed.to_save(alone(), net, task, computes=True, registered=registered[:2])
    assert entry is not None
    assert entry["used"] == [["the task", "big"]]


def test_a_setter_that_raises_does_not_keep_a_value_from_coming_back() -> None:
    class Locked:
        def __init__(self) -> None:
            vars(self)["rate"] = 1.0

        def __setattr__(self, name: str, value: Any) -> None:
            raise ValueError("frozen")

    owner = Locked()
    attribute_owners.put(owner, "rate", 0.5, None)
    assert vars(owner)["rate"] == 0.5
    locked = np.zeros(3)
    locked.flags.writeable = False
    assert attribute_owners.refilled(locked, np.ones(3), {}).tolist() == [1, 1, 1]
