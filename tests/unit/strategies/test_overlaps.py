"""Which tensors of a model lie in each other's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from paceline.strategies.guards.overlaps import overlap_in
from paceline.strategies.memory.meta_init import record_init


def pair(one: Any, other: Any) -> nn.Module:
    model = nn.Module()
    for name, value in (("one", one), ("other", other)):
        if isinstance(value, nn.Parameter):
            model.register_parameter(name, value)
        else:
            model.register_buffer(name, value)
    return model


def windows(one: Callable[[Any], Any], other: Callable[[Any], Any]) -> nn.Module:
    whole = torch.randn(4, 6)
    return pair(nn.Parameter(one(whole)), nn.Parameter(other(whole)))


def same(value: Any) -> nn.Module:
    return pair(value, value)


def beside(value: Any) -> nn.Module:
    return pair(nn.Parameter(value), value)


def from_numpy() -> nn.Module:
    values = np.ones((2, 3), np.float32)
    return pair(nn.Parameter(torch.from_numpy(values)), torch.from_numpy(values))


def two_buffers() -> nn.Module:
    value = torch.ones(3)
    return pair(value, value[1:])


def complex_and_real() -> nn.Module:
    value = torch.randn(3, 2, dtype=torch.complex64)
    return pair(nn.Parameter(value), nn.Parameter(torch.view_as_real(value)[..., 1]))


def held() -> nn.Module:
    model = nn.Linear(3, 2)
    model.kept = {"weight": [model.weight.detach()[0]]}
    return model


MEETING = {
    "the whole": lambda: windows(lambda one: one, lambda one: one),
    "some rows": lambda: windows(lambda one: one, lambda one: one[2:]),
    "one number": lambda: windows(lambda one: one[:2], lambda one: one.view(-1)[11:]),
    "a column": lambda: windows(lambda one: one[:, 1:3], lambda one: one[:, 2:]),
    "another type": complex_and_real,
    "a buffer": lambda: beside(torch.ones(2)),
    "two buffers": two_buffers,
}
APART = {
    "one parameter": lambda: same(nn.Parameter(torch.ones(2))),
    "one buffer": lambda: same(torch.ones(2)),
    "rows": lambda: windows(lambda one: one[:2], lambda one: one[2:]),
    "columns": lambda: windows(lambda one: one[:, :3], lambda one: one[:, 3:]),
    "nothing": lambda: windows(lambda one: one[:0], lambda one: one[:0]),
    "copies": lambda: windows(lambda one: one, lambda one: one.clone()),
    "a number": lambda: pair(nn.Parameter(torch.tensor(1.0)), torch.tensor(2)),
    "an LSTM": lambda: nn.LSTM(3, 4, num_layers=2),
}


@pytest.mark.parametrize("name", MEETING)
def test_tensors_that_overlap(name: str) -> None:
    wanted = "other lies in the memory of one "
    assert (overlap_in(MEETING[name]()) or "").startswith(wanted)
    made, reason = record_init(MEETING[name])
    assert made is not None, reason
    assert (made.overlap or "").startswith(wanted)


@pytest.mark.parametrize("name", APART)
def test_tensors_that_do_not(name: str) -> None:
    model = APART[name]()
    assert overlap_in(model, held=True) is None
    assert overlap_in(model.to("meta"), held=True) is None
    made, reason = record_init(APART[name])
    assert made is not None, reason
    assert made.overlap is None


def test_memory_that_torch_does_not_know_to_be_one() -> None:
    assert overlap_in(from_numpy()) is not None


def test_plain_attributes_count_where_they_are_asked_for() -> None:
    assert overlap_in(held()) is None
    assert (overlap_in(held(), held=True) or "").startswith("kept lies in the memory of weight ")
    layer = nn.utils.spectral_norm(nn.Linear(3, 2))  # whose plain weight is made anew in every pass
    assert layer.weight.data_ptr() == layer.weight_orig.data_ptr()
    assert overlap_in(nn.Sequential(layer), held=True) is None
