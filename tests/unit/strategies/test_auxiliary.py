"""Gradients of auxiliary terms: each parameter has its own, whatever autograd shares between them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from paceline.strategies.auxiliary import Auxiliary
from paceline.task import Loss

SIZE, WEIGHT = 8, 4
MADE: dict[str, Callable[[list[nn.Parameter]], Tensor]] = {
    "one gradient for two": lambda held: (held[0] + held[1]).square().sum(),
    "one number in the place of many": lambda held: held[0].sum() + 2 * held[2].sum(),
    "what the pass began with": lambda held: held[3] + 1,
    "laid out the other way": lambda held: (torch.arange(6.0).view(3, 2).t() * held[2]).square().sum(),
}


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("batches", [1, 2])
def test_the_gradients_are_those_of_backward(kind: str, batches: int) -> None:
    held = [nn.Parameter(torch.full(shape, 1.5)) for shape in ((3,), (3,), (2, 3), ())]
    auxiliary, start = Auxiliary(held), torch.tensor(1 / SIZE)
    for _ in range(batches):
        auxiliary.backward({"term": Loss(MADE[kind](held), WEIGHT)}, lambda _: start, SIZE)
    auxiliary.merge(SIZE, 1.0)
    found = [one.grad for one in held]
    for one in held:
        one.grad = None
    (MADE[kind](held) / WEIGHT).backward()
    for one, gradient in zip(held, found, strict=True):
        assert (one.grad is None) == (gradient is None)
        if one.grad is not None and gradient is not None:
            assert torch.equal(one.grad, gradient)
            assert gradient.stride() == one.stride()
    assert float(start) == 1 / SIZE
