"""Which schedules of an optimizer a run knows of: those that it was given, for whichever group, and registered ones."""

from __future__ import annotations

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, SequentialLR

from paceline.errors import InputError
from paceline.training.user_loop.schedules import check_kept, noted


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)


def flat(of: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(of, lambda _: 1.0)


def test_one_that_was_made_for_a_group_that_came_to_nothing_is_not_the_loops_own() -> None:
    made = optimizer()
    before, now = noted(flat)(made), noted(flat)(made)
    check_kept(made, [now])
    assert before is not now


def test_nor_are_those_that_it_is_made_of() -> None:
    made = optimizer()
    both = noted(lambda of: SequentialLR(of, [flat(of), flat(of)], milestones=[3]))(made)
    check_kept(made, [])
    assert both is not None


def test_one_that_nobody_was_given_is() -> None:
    made = optimizer()
    own = flat(made)
    with pytest.raises(
        InputError, match=r"a LambdaLR of its own .* run\.register\(\"lambdalr\", scheduler\)"
    ):
        check_kept(made, [noted(lambda _: None)(made)])
    check_kept(made, [own])
