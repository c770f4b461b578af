"""Plain numbers that passes change and may compute with: each worker's follow the passes of its own samples."""

from __future__ import annotations

import itertools
import re
import time
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from paceline.task import Loss, Task
from paceline.training.checks.hidden_state import HiddenState

A_GLOBAL = {"calls": 0}
Change = Callable[[Any, Tensor], Any]


class Net(nn.Module):
    """Changes what it is told to, with numbers of every kind at hand."""

    of_class: float | None = None

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.layer, self.lazy, self.change = nn.Linear(3, 3), nn.LazyLinear(3), change
        self._private = self.public = 0
        self.later: float | None = None
        self.listed, self.history = [0], []
        self.recent: deque[float] = deque(maxlen=4)
        self.nested = {"a": {"n": 0}}
        self.config = SimpleNamespace(heat=1.0)
        self.scalar = np.float64(0)
        self.iterator, self.count = iter(range(1000)), itertools.count()

    def forward(self, inputs: Tensor) -> Tensor:
        self.change(self, inputs)
        return self.lazy(torch.tanh(self.layer(inputs)))


class Counting(Task):
    """A task whose loss may change something of its own."""

    run: float | None = None

    def __init__(self, change: Change | None = None) -> None:
        self.change = change

    def loss(self, model: nn.Module, batch: Tensor) -> Loss:
        if self.change is not None:
            self.change(self, batch)
        return Loss.mean(model(batch).sum(1))


def notes(task: Task, model: nn.Module, *, passes: int, sharded: bool = True) -> list[str]:
    watch, told = HiddenState(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number in range(4):
        task.steps_done = number
        watch.enter(model, task, sharded=sharded)
        with watch.passes():
            loss = watch.around(task.loss)
            for index in range(passes):
                loss(model, torch.rand(5 + index % 2, 3)).total.backward()
            optimizer.step()
        told += watch.check(number, several=True)
    return told


def mean_later(owner: Any, inputs: Tensor) -> None:
    value = float(inputs.mean())
    owner.later = value if owner.later is None else 0.9 * owner.later + 0.1 * value


def made_in_a_pass(owner: Any, inputs: Tensor) -> None:
    owner.made = getattr(owner, "made", 0) + 1


def private(owner: Any, inputs: Tensor) -> None:
    owner._private += 1


def numpy_scalar(owner: Any, inputs: Tensor) -> None:
    owner.scalar = owner.scalar + 1


def item(owner: Any, inputs: Tensor) -> None:
    owner.listed[0] += 1


def nested(owner: Any, inputs: Tensor) -> None:
    owner.nested["a"]["n"] += 1


def settings(owner: Any, inputs: Tensor) -> None:
    owner.config.heat *= 0.9


def a_global(owner: Any, inputs: Tensor) -> None:
    A_GLOBAL["calls"] += 1


CHANGES: dict[str, tuple[Change, str]] = {
    "private": (private, "_private"),
    "None at first": (mean_later, "later"),
    "made in a pass": (made_in_a_pass, "made"),
    "numpy": (numpy_scalar, "scalar"),
    "item": (item, r"listed\[0\]"),
    "nested": (nested, r"nested\['a'\]\['n'\]"),
    "settings": (settings, r"config\.heat"),
    "list": (lambda net, x: net.history.append(float(x.mean())), r"len\(history\)"),
    "deque": (lambda net, x: net.recent.append(float(x.mean())), r"len\(recent\)"),
    "iterator": (lambda net, x: next(net.iterator), "iterator"),
    "count": (lambda net, x: next(net.count), "count"),
    "global": (a_global, r"A_GLOBAL\['calls'\]"),
}


@pytest.mark.parametrize("passes", [1, 2, 3])
@pytest.mark.parametrize("kind", CHANGES)
def test_a_number_that_follows_the_passes_is_told_of_once(kind: str, passes: int) -> None:
    change, name = CHANGES[kind]
    [told] = notes(Counting(), Net(change), passes=passes)
    assert re.search(rf"changes the number {name} from pass to pass \(", told)
    assert "task.steps_done" in told


def test_so_is_one_of_the_task_and_of_its_class() -> None:
    def average(task: Any, batch: Tensor) -> None:
        task.run = float(batch.mean()) + 0.9 * (task.run or 0)

    [told] = notes(Counting(average), Net(lambda net, x: None), passes=2)
    assert "changes the number task.run from pass to pass" in told


def test_one_that_a_closure_holds_is_told_of() -> None:
    state = {"mean": 0.0}

    def move(net: Any, inputs: Tensor) -> None:
        state["mean"] += float(inputs.mean())

    [told] = notes(Counting(), Net(move), passes=2)
    assert "changes the number state['mean']" in told


def test_a_pass_that_is_a_step_may_be_counted() -> None:
    assert notes(Counting(), Net(private), passes=1, sharded=False) == []


def by_steps(task: Any, batch: Tensor) -> None:
    task.weight = task.steps_done / 100


def lay_out(net: Any, inputs: Tensor) -> None:
    if net.later is None:
        net.later, net.public = 1 / 3, 128


def timed(net: Any, inputs: Tensor) -> None:
    net.started = time.perf_counter()
    net.total_time = getattr(net, "total_time", 0.0) + 0.001
    net.config.stamp = time.time()


def sizes(net: Any, inputs: Tensor) -> None:
    net.rows, net.shape = len(inputs), tuple(inputs.shape)


@pytest.mark.parametrize("passes", [1, 2, 3])
@pytest.mark.parametrize("change", [lay_out, timed, sizes])
def test_what_does_not_follow_the_passes_is_left_alone(change: Change, passes: int) -> None:
    assert notes(Counting(by_steps), Net(change), passes=passes) == []
