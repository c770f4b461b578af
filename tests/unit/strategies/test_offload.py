"""Rows that live elsewhere: a bunch at a time is updated as all at once would be."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from paceline.strategies.memory.offload import HostRows, without_memory

SHAPES = [(3, 4), (5,), (0, 4), (2, 2)]


def made() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def optimize(parameters: list[nn.Parameter], steps: range, optimizer: Any, paced: Any) -> None:
    for step in steps:
        for place, parameter in enumerate(parameters):
            # The last one goes without in the first step, and must not be touched by it.
            unused = step == 0 and place == len(SHAPES) - 1
            parameter.grad = None if unused else torch.full(SHAPES[place], 0.1 * (step + place))
        optimizer.step()
        paced.step()


def two_ways(bunch: int) -> tuple[list[torch.Tensor], list[nn.Parameter], HostRows, Any, Any, Any]:
    plain = [nn.Parameter(values) for values in made()]
    expected = torch.optim.AdamW(plain, lr=0.1)
    optimize(plain, range(4), expected, schedule(expected))
    homes = made()
    stand_ins = [
        nn.Parameter(without_memory(home.shape, home.dtype, home.device), requires_grad=True)
        for home in homes
    ]
    optimizer = torch.optim.AdamW(stand_ins, lr=0.1)
    paced = schedule(optimizer)
    rows = HostRows(dict(zip(stand_ins, homes, strict=True)), optimizer, bunch)
    optimize(stand_ins, range(4), optimizer, paced)
    for home, values in zip(homes, plain, strict=True):
        assert torch.equal(home, values)
    assert state_of(optimizer) == state_of(expected)
    return homes, stand_ins, rows, optimizer, paced, expected


def state_of(optimizer: torch.optim.Optimizer) -> Any:
    state = optimizer.state_dict()["state"]
    return {
        key: {slot: value.tolist() for slot, value in sorted(slots.items())}
        for key, slots in sorted(state.items())
    }


@pytest.mark.parametrize("bunch", [1, 64, 1 << 20])
def test_bunches_are_updated_as_all_at_once(bunch: int) -> None:
    homes, stand_ins, rows, optimizer, *_ = two_ways(bunch)
    for parameter in stand_ins:
        assert parameter.untyped_storage().nbytes() == parameter.element_size()
        assert parameter.grad is not None
        assert parameter.grad.shape == parameter.shape
    before = [home.clone() for home in homes]
    rows.release()
    optimizer.zero_grad()
    optimizer.step()
    stand_ins[1].data, stand_ins[1].grad = torch.ones(5), torch.ones(5)
    optimizer.step()  # its own again: it works on the parameters, not on the rows
    assert not torch.equal(stand_ins[1], torch.ones(5))
    assert all(torch.equal(home, old) for home, old in zip(homes, before, strict=True))


def test_what_is_loaded_lands_beside_the_rows() -> None:
    homes, stand_ins, rows, optimizer, paced, _ = two_ways(1)
    before, weights = copy.deepcopy(optimizer.state_dict()), [home.clone() for home in homes]
    saved = state_of(optimizer)
    optimize(stand_ins, range(4, 6), optimizer, paced)
    after = state_of(optimizer), [home.clone() for home in homes]
    assert state_of(optimizer) != saved
    with rows.at_home():
        assert all(one.data_ptr() == home.data_ptr() for one, home in zip(stand_ins, homes, strict=True))
        optimizer.load_state_dict(before)
    for home, values in zip(homes, weights, strict=True):
        home.copy_(values)
    assert state_of(optimizer) == saved
    for group, old in zip(optimizer.param_groups, before["param_groups"], strict=True):
        assert group["lr"] == old["lr"]
    paced.last_epoch -= 2
    optimize(stand_ins, range(4, 6), optimizer, paced)
    assert state_of(optimizer) == after[0]
    assert all(torch.equal(home, one) for home, one in zip(homes, after[1], strict=True))
