"""What a run has changed beside tensors is in its checkpoints, as plain values, and is set where a run goes on from one."""

from __future__ import annotations

import io
import math
import operator
import time
from collections import Counter, OrderedDict, defaultdict, deque
from decimal import Decimal
from enum import Enum, Flag, IntEnum
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from paceline.errors import InputError
from paceline.task import Task
from paceline.training.attribute_changes import Then, read_saved
from paceline.training.attribute_values import copied, held_back, opened, same
from paceline.training.changed_attributes import ChangedAttributes
from paceline.training.saved_attributes import decoded, encoded
from paceline.world import alone
from tests.unit.training.test_changed_attributes import Net, begun, change


class Phase(Enum):
    """A word."""

    EARLY = "early"
    LATE = "late"


class Size(IntEnum):
    """A number."""

    LARGE = 3


class Mode(Flag):
    """Two at once."""

    A = 1
    B = 2


class Pair(NamedTuple):
    """Two values."""

    first: int
    second: float


def halve(value: Any) -> Any:
    """Do what a loop decides on."""
    return value * 0.5


def nested(depth: int) -> Any:
    """Return lists in lists."""
    value: Any = 1
    for _ in range(depth):
        value = ["list", [value]]
    return value


def stored(value: Any) -> Any:
    """Return a value as a checkpoint gives it back."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 3, 0.1, float("nan"), "text", 1j, b"\x00\xff", torch.float16, torch.device("cpu")),
        *((1, [2, {"a": {3, (4, "b")}}]), frozenset({1}), {1: None, "b": (2, "x")}),
        *(np.float64(0.1), np.float32(0.1), np.int64(3), np.bool_(True)),
        *(math.sin, operator.neg, np.tanh, torch.special.expit, Net.fixed, Phase),
        *(torch.relu, torch.tanh, F.gelu, F.relu, nn.GELU, halve, Net),
        *(
            Phase.LATE,
            Size.LARGE,
            Mode.A | Mode.B,
            {Phase.LATE: {("a", 1): Pair(1, 2.0)}},
            partial(halve, value=3),
        ),
        *(deque([1, 2.0], maxlen=3), OrderedDict(b=1, a=2), Counter("aab"), defaultdict(list, a=[1])),
        *(
            Fraction(1, 3),
            Decimal("0.1"),
            Path("a/b"),
            np.ones((2, 3), np.float32),
            torch.tensor(0.25),
            torch.ones(2, 2),
        ),
        *(torch.tensor([1, 2], dtype=torch.bfloat16), torch.empty(0, 3), np.array(2.0)),
    ],
)
def test_values_go_into_a_checkpoint_and_come_back(value: Any) -> None:
    (copy,) = copied(value) or (...,)
    back = decoded(stored(encoded(copy)))
    assert same(back, copy)
    again = opened(back)
    assert type(again) is type(value)
    assert repr(again) == repr(value)


@pytest.mark.parametrize(
    "name",
    [
        "os.system",
        "torch.load",
        "torch.hub.load",
        "builtins.exec",
        "posix.system",
        "no.such",
        "",
        "_operator.call",
        "numpy.load",
        "numpy.array",
        "math.x",
    ],
)
def test_other_functions_are_not_looked_up(name: str) -> None:
    assert held_back(decoded(["function", [name, ""]])) is not None


@pytest.mark.parametrize(
    "entry",
    [{}, {"alike": 3, "others": []}, {"alike": [["a", "__class__", 1, 2]], "others": []}]
    + [
        {"alike": [["a", "b", 1, value]], "others": []}
        for value in ([], ["os", []], ["dtype", ["load"]], ["numpy", ["O", "00" * 8]])
    ]
    + [
        {"alike": [["a", "b", 1, value]], "others": []}
        for value in (
            *(
                ["enum", [["function", [f"{__name__}.Phase", ""]], "x"]],
                ["deque", [["list", []], -1]],
                ["deque", [5, 2**70]],
            ),
            *(
                ["partial", [3, ["list", []], ["dict", []]]],
                ["Decimal", ["x"]],
                ["Fraction", ["1/x"]],
                ["OrderedDict", [3]],
            ),
            *(
                ["ndarray", ["O", ["list", [1]], ["bytes", ["00" * 8]]]],
                ["ndarray", ["<f8", ["list", [2**60]], ["bytes", [""]]]],
            ),
            *(
                ["Tensor", [["dtype", ["torch.float32"]], ["list", [3]], ["bytes", ["00"]]]],
                ["Tensor", [1, 2, 3]],
            ),
            *(["namedtuple", [["function", [f"{__name__}.Pair", ""]], ["tuple", [1]]]], nested(5000)),
        )
    ],
)
def test_what_no_run_writes_is_refused(entry: Any) -> None:
    with pytest.raises((LookupError, TypeError, ValueError)):
        read_saved(entry)


def saved(changed: ChangedAttributes, net: nn.Module, task: Task | None = None) -> Then:
    """Return what a checkpoint of a run of one worker gives back."""
    then = read_saved(stored(changed.to_save(alone(), net, task, computes=True)))
    assert then is not None
    return then


def go_on(then: Then, net: nn.Module, task: Task | None = None) -> tuple[ChangedAttributes, list[str]]:
    """Begin another run with it."""
    changed = ChangedAttributes()
    changed.begin(net, task)
    return changed, changed.go_on(alone(), net, task, then, 6, computes=True)


def test_a_run_goes_on_with_what_was_changed_and_saves_it_again() -> None:
    net, changed = begun()
    assert changed.to_save(alone(), net, None, computes=True) is None
    change(net)
    net.lazy(torch.ones(1, 3))
    then = saved(changed, net)
    other = Net()
    changed, texts = go_on(then, other)
    assert (other.drop.p, other.act, other.also, other.new) == (0.5, torch.relu, {"a": [2]}, 1)
    assert not any(one.training for one in other.modules())
    assert not texts
    third = Net()
    go_on(saved(changed, other), third)
    assert (third.drop.p, third.act) == (0.5, torch.relu)


def test_what_a_start_is_given_anew_stays_and_is_told() -> None:
    task, net = Task(), Net()
    task.rate = 0.1  # type: ignore[attr-defined]
    changed = ChangedAttributes()
    changed.begin(net, task)
    task.rate, net.drop.p = 0.05, 0.5  # type: ignore[attr-defined]
    then = saved(changed, net, task)
    task, net = Task(), Net()
    task.rate = 0.2  # type: ignore[attr-defined]
    _, texts = go_on(then, net, task)
    assert (task.rate, net.drop.p) == (0.2, 0.5)  # type: ignore[attr-defined]
    assert texts == [
        "rate of the task was changed in the run from 0.1 to 0.05, but this start begins with 0.2, which stays."
    ]


def test_a_time_that_a_start_has_read_stays_without_a_word() -> None:
    net = Net()
    net.seen = time.time() - 1000
    changed = ChangedAttributes()
    changed.begin(net, None)
    net.seen = time.time() - 900
    then = saved(changed, net)
    other = Net()
    other.seen = now = time.time()
    assert not go_on(then, other)[1]
    assert other.seen == now


def closure(net: Net) -> None:
    factor = 2
    net.act = lambda value: value * factor


def hook(net: Net) -> None:
    net.drop.register_forward_hook(lambda *given: given[-1] * 0.5)


def layer(net: Net) -> None:
    net.drop = nn.Identity()  # type: ignore[assignment]


def test_another_layer_is_refused_unless_it_is_there_already() -> None:
    net, changed = begun()
    layer(net)
    then = saved(changed, net)
    with pytest.raises(
        InputError, match=r"^drop was replaced in the run and is a Identity by now, but this start makes it a"
    ):
        go_on(then, Net())
    other = Net()
    layer(other)
    go_on(then, other)


def number(net: Net) -> None:
    net.drop.p = torch.full((5000,), 0.5)  # type: ignore[assignment]


def method(net: Net) -> None:
    net.act = net.drop.extra_repr


def lazy_layer(net: Net) -> None:
    net.later = nn.GELU()


@pytest.mark.parametrize("act", [closure, hook, number, method, lazy_layer])
def test_what_cannot_be_set_is_told_of_unless_a_first_step_makes_it_again(act: Any) -> None:
    net, changed = begun()
    act(net)
    then = saved(changed, net)
    other = Net()
    changed, texts = go_on(then, other)
    assert not texts
    act(other)
    assert not changed.after_step(other, None)
    changed, _ = go_on(then, third := Net())
    (text, *_) = changed.after_step(third, None)
    assert "set in the run to what no checkpoint holds" in text
    assert not changed.after_step(third, None)


def test_what_a_log_is_written_with_is_left_alone() -> None:
    net, changed = begun()
    net.seen, net.say, net.file = io.StringIO().write, print, io.StringIO()
    assert changed.to_save(alone(), net, None, computes=True) is None
