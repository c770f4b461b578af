"""The model that a loop holds, where a group that has formed anew works with another one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from paceline.strategies.precision import Precision
from paceline.training.user_loop.handle import Handle


def replica() -> Any:
    layer = nn.Linear(3, 3)
    model = nn.ModuleDict({"first": nn.Sequential(layer), "second": nn.Sequential(layer)})
    return SimpleNamespace(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_module_with_two_names_is_one_in_the_next_group_too() -> None:
    before, after = replica(), replica()
    held = before.model
    kept, values = held["first"][0], after.model["first"][0].weight
    called: list[int] = []
    handle = Handle(before, Precision("fp32", torch.device("cpu")))
    kept.register_forward_hook(lambda *_: called.append(1))
    handle.adopt(after)
    assert after.model is held
    assert held["first"][0] is kept
    assert held["second"][0] is kept
    assert kept.weight is values
    held["second"](torch.ones(3))
    assert called == [1]
