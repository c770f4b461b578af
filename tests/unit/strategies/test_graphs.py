"""What a captured step could not follow, found before it is captured. The capture itself needs a GPU (tests/gpu)."""

from __future__ import annotations

import itertools
import random
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from paceline import Loss, Task
from paceline.strategies.base import ShardWork, StepWork
from paceline.strategies.graphs.generators import drew_on_the_host
from paceline.strategies.graphs.inputs import StaticInputs, UnfitBatchError, form_of
from paceline.strategies.graphs.python_state import PythonState
from paceline.world import seeds

settings = types.ModuleType("settings")  # as a module of the user's
vars(settings).update(scale=1.0)
SCALE = 1.0
TABLE = torch.ones(3)


@dataclass(slots=True)
class Slotted:
    scale: float = 1.0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(3, 2), nn.Dropout(0.1)
        self.register_buffer("mask", torch.ones(2))
        self.settings = SimpleNamespace(width=2, names=["a"])
        self.plain = torch.ones(2)
        self.array = np.ones(2)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.drop(self.layer(x)) * self.mask
        return made


class Counting(Task):
    scale, shown = 1.0, 1.0

    def __init__(self) -> None:
        self.weights = {"first": [1.0, 2.0]}
        self.slotted, self.active = Slotted(), {"main"}
        self.random, self.numpy = random.Random(1), np.random.default_rng(1)
        self.torch = torch.Generator()
        self.count, self.items = itertools.count(), iter([1, 2, 3])

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return Loss.mean(model(batch).sum(1) * self.scale * SCALE * TABLE.sum() * settings.scale)


class Annealed(Counting):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return Loss.mean(model(batch).sum(1) * self.steps_done)


def closing_over(value: list[float]) -> tuple[Callable[[nn.Module, Any], Loss], Callable[[float], None]]:
    factor = value[0]

    def loss(model: nn.Module, batch: Any) -> Loss:
        return Loss.mean(model(batch).sum(1) * factor)

    def change(to: float) -> None:
        nonlocal factor
        factor = to

    return loss, change


CHANGES: dict[str, Callable[[Net, Counting], Any]] = {
    "an attribute of a layer": lambda net, _: setattr(net.drop, "p", 0.2),
    "evaluation mode": lambda net, _: net.drop.eval(),
    "a number of the task": lambda _, task: setattr(task, "scale", 2.0),
    "a list in a dict": lambda _, task: task.weights["first"].append(3.0),
    "an object's attribute": lambda net, _: setattr(net.settings, "width", 3),
    "a list of an object": lambda net, _: net.settings.names.append("b"),
    "another parameter": lambda net, _: setattr(net.layer, "bias", nn.Parameter(torch.zeros(2))),
    "another buffer of the same value": lambda net, _: setattr(net, "mask", torch.ones(2)),
    "a write to a tensor on the CPU": lambda net, _: net.plain.add_(1),
    "another tensor of the same value": lambda net, _: setattr(net, "plain", torch.ones(2)),
    "a write to an array": lambda net, _: net.array.__setitem__(0, 5.0),
    "a hook": lambda net, _: net.layer.register_forward_hook(lambda *_: None),
    "a number of the class": lambda *_: setattr(Counting, "shown", 2.0),
    "another layer": lambda net, _: setattr(net, "layer", nn.Linear(3, 2)),
    "a global": lambda *_: globals().__setitem__("SCALE", 3.0),
    "a number of a module": lambda *_: setattr(settings, "scale", 2.0),
    "a slot of an object": lambda _, task: setattr(task.slotted, "scale", 2.0),
    "a set": lambda _, task: task.active.add("other"),
    "a draw of Python's": lambda _, task: task.random.random(),
    "a draw of numpy's": lambda _, task: task.numpy.random(),
    "a draw of torch's": lambda _, task: torch.rand(1, generator=task.torch),
    "a count": lambda _, task: next(task.count),
    "an iterator": lambda _, task: next(task.items),
    "a hook on a parameter": lambda net, _: net.layer.weight.register_hook(lambda gradient: gradient * 2),
    "another global tensor": lambda *_: globals().__setitem__("TABLE", torch.ones(3)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=[*CHANGES])
def test_what_a_loss_may_read_is_compared(
    change: Callable[[Net, Counting], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Counting, "shown", 1.0)
    monkeypatch.setitem(globals(), "SCALE", 1.0)
    monkeypatch.setattr(settings, "scale", 1.0)
    monkeypatch.setitem(globals(), "TABLE", torch.ones(3))
    net, task = Net(), Counting()
    state = PythonState(net, task.loss)
    task.loss(net, torch.ones(4, 3)).total.backward()
    task.steps_done = 5  # the run's own counter
    net.layer.weight.data.add_(1)  # what an optimizer does
    assert state.is_unchanged()
    assert not state.reads_steps
    change(net, task)
    assert not state.is_unchanged()


def test_a_variable_that_the_loss_closes_over_is_compared() -> None:
    loss, change = closing_over([2.0])
    state = PythonState(Net(), loss)
    change(2.0)
    assert state.is_unchanged()
    change(3.0)
    assert not state.is_unchanged()


def test_what_a_hook_on_a_parameter_closes_over_is_compared() -> None:
    net, factors = Net(), [1.0]
    net.layer.weight.register_hook(lambda gradient: gradient * factors[0])
    state = PythonState(net, Counting().loss)
    assert state.is_unchanged()
    factors[0] = 2.0
    assert not state.is_unchanged()


@pytest.mark.parametrize(
    "one", [itertools.cycle([1.0, 2.0]), (one for one in (1.0, 2.0))], ids=["cycle", "generator"]
)
def test_an_iterator_that_does_not_tell_where_it_stands_is_refused(one: Iterator[float]) -> None:
    task = Counting()
    task.items = one  # type: ignore[assignment]
    with pytest.raises(ValueError, match="where it stands"):
        PythonState(Net(), task.loss)
    assert list(itertools.islice(one, 2)) == [1.0, 2.0]


def test_a_loss_that_counts_steps_is_found() -> None:
    assert PythonState(Net(), Annealed().loss).reads_steps


@pytest.mark.parametrize(
    "draw", [lambda: torch.rand(1), random.random, np.random.rand], ids=["torch", "random", "numpy"]
)
def test_numbers_drawn_on_the_host_are_found(draw: Callable[[], Any]) -> None:
    with seeds.preserved():
        seeds.seed_everything(7)
        assert not drew_on_the_host(7)
        draw()
        assert drew_on_the_host(7)


def work(*batches: Any) -> StepWork:
    return StepWork(0, 8, [ShardWork(0, 1, np.arange(8), batches)])


def test_batches_of_one_form_have_the_same_shapes_types_and_other_values() -> None:
    form, tensors = form_of(work([torch.ones(2, 3), {"a": torch.ones(2)}, 5]))
    assert [one.shape for one in tensors] == [(2, 3), (2,)]
    assert form == form_of(work([torch.zeros(2, 3), {"a": torch.zeros(2)}, 5]))[0]
    for other in (
        [torch.ones(2, 4), {"a": torch.ones(2)}, 5],
        [torch.ones(2, 3), {"a": torch.ones(2)}, 6],
        [torch.ones(2, 3), {"b": torch.ones(2)}, 5],
        [torch.ones(2, 3, dtype=torch.float64), {"a": torch.ones(2)}, 5],
    ):
        assert form != form_of(work(other))[0]
    with pytest.raises(UnfitBatchError, match="Generator"):
        form_of(work([torch.Generator()]))


def test_batches_laid_out_otherwise_have_another_form() -> None:
    pictures = torch.ones(2, 3, 4, 4)
    other = pictures.to(memory_format=torch.channels_last)
    assert form_of(work([pictures]))[0] != form_of(work([other]))[0]


def test_batches_without_tensors_need_no_filling() -> None:
    StaticInputs(work([5]), torch.device("cpu")).fill([])
