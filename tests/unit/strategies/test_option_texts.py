"""Options of optimizers are told by their values, and only those that somebody reads."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from paceline.state.optimizer_state import same_option
from paceline.strategies.guards.option_texts import OptionTexts
from paceline.strategies.in_turns.optimizers import Optimizers

NAN = float("nan")


def adam(**options: Any) -> torch.optim.Adam:
    return torch.optim.Adam([{"params": [nn.Parameter(torch.ones(2))]} for _ in range(3)], **options)


def is_changed(optimizer: torch.optim.Optimizer, change: Callable[[dict[str, Any]], object]) -> bool:
    texts = OptionTexts()
    before = texts.look(optimizer)
    assert texts.look(optimizer) is before
    change(optimizer.param_groups[1])
    after = texts.look(optimizer)
    assert texts.look(optimizer) is after
    return before is not after


@pytest.mark.parametrize(
    ("was", "now", "changes"),
    [
        (0.1, 0.2, True),
        (0.1, float("0.1"), False),
        (NAN, float("nan"), False),
        (torch.tensor(NAN), torch.tensor(NAN), False),
        (torch.tensor(0.1), torch.tensor(0.2), True),
        (np.array([0.1, NAN]), np.array([0.1, NAN]), False),
        (np.array([0.1, 0.2]), np.array([0.1, 0.3]), True),
        ([0.1, {"a": NAN}], [0.1, {"a": NAN}], False),
        ([0.1, {"a": 1}], [0.1, {"a": 2}], True),
        (object(), object(), False),
    ],
)
def test_a_value_is_changed_where_it_is_another(was: Any, now: Any, changes: bool) -> None:
    optimizer = adam()
    optimizer.param_groups[1]["lr"] = was
    assert is_changed(optimizer, lambda group: group.update(lr=now)) == changes
    if type(was) is not object:
        assert same_option(was, now) != changes


def test_what_is_written_in_place_is_seen() -> None:
    assert is_changed(adam(lr=torch.tensor(0.1)), lambda group: group["lr"].data.fill_(NAN))
    optimizer = adam()
    optimizer.param_groups[1]["betas"] = [0.9, 0.99]
    assert is_changed(optimizer, lambda group: group["betas"].reverse())
    optimizer.param_groups[1]["lr"] = torch.tensor(NAN)
    assert not is_changed(optimizer, lambda group: group["lr"].fill_(NAN))


def test_what_no_optimizer_reads_is_its_owners() -> None:
    assert not is_changed(adam(), lambda group: group.update(last_seen=time.time()))
    assert not is_changed(adam(), lambda group: group.update(foreach=True))
    assert is_changed(adam(), lambda group: group.update(eps=1e-3))


def test_each_of_several_optimizers_has_options_of_its_own() -> None:
    several = Optimizers({"one": adam(), "other": torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)})
    assert is_changed(several, lambda group: group.update(betas=(0.5, 0.5)))
    assert not is_changed(several, lambda group: group.update(nesterov=True))


def test_a_group_that_is_added_is_seen() -> None:
    optimizer = adam()
    texts = OptionTexts()
    before = texts.look(optimizer)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert texts.look(optimizer) is not before
