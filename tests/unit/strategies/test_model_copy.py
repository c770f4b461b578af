"""A copy of a model learns what a loop makes of the original, or says that it has changed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from paceline.strategies.pipeline.model_copy import ModelCopy


class Slotted:
    """Keeps what it holds in slots."""

    __slots__ = ("layer",)


class Net(nn.Module):
    """Refers to its layers in containers that torch does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        self.active, self.queue, self.chosen = [self.a], deque([self.a]), {self.a}
        self.nested: Any = {"rows": [[self.a, 1]]}
        self.slotted = Slotted()
        self.slotted.layer = self.a  # type: ignore[attr-defined]
        self.steps = [0]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda net: net.active.append(net.b), "active"),
        (lambda net: net.active.__setitem__(0, net.b), "active"),
        (lambda net: net.active.clear(), "active"),
        (lambda net: net.queue.append(net.b), "queue"),
        (lambda net: net.chosen.add(net.b), "chosen"),
        (lambda net: net.nested["rows"][0].append(net.b), "nested"),
        (lambda net: net.nested["rows"].pop(), "nested"),
        (lambda net: setattr(net.slotted, "layer", net.b), "slotted"),
        (lambda net: setattr(net, "active", [net.b]), "active"),
    ],
)
def test_a_container_of_modules_that_is_changed_is_a_change_of_the_model(
    change: Callable[[Any], Any], name: str
) -> None:
    model = Net()
    copied = ModelCopy(model)
    assert copied.changed() is None
    model.steps.append(1)
    assert copied.changed() is None  # it leads to no module: the copy has the same list
    change(model)
    assert copied.changed() == name
