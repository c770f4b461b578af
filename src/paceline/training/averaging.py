"""Averages of weights (EMA, SWA) as one more thing that the optimizer keeps for each parameter.

So they are updated with the step or not at all, lie where the weight lies, and are saved, resumed, handed on and sharded as all
that an optimizer keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.declared import Average
from paceline.errors import InputError
from paceline.state.chunks import AVERAGE as SLOT
from paceline.strategies.replica import Replica


def keep_average(optimizer: Optimizer, average: Average, taken: Callable[[], int]) -> Optimizer:
    """Have an optimizer average the weights after each of its steps; `taken` says how many the run has taken before."""

    unmoved: dict[Tensor, Tensor] = {}
    """The averages of weights that this step is the first to move since averages are kept: what they have been all along."""

    @torch.no_grad()
    def keep(stepped: Optimizer, *_: Any) -> None:
        unmoved.clear()
        if not average.begun(taken()):
            return
        for parameter in _weights(stepped):
            # There is nowhere to keep them before: Adam takes an empty state for its beginning.
            if parameter.grad is not None and SLOT not in stepped.state.get(parameter, {}):
                unmoved[parameter] = parameter.detach().clone()

    @torch.no_grad()
    def update(stepped: Optimizer, *_: Any) -> None:
        for parameter, value in unmoved.items():
            stepped.state[parameter][SLOT] = value
        unmoved.clear()
        share = average.share(taken() + 1)
        if share is None:
            return
        for parameter in _weights(stepped):
            slots = stepped.state.get(parameter, {})
            if SLOT in slots:
                slots[SLOT].lerp_(parameter.detach(), share)
            elif parameter.grad is not None:
                stepped.state[parameter][SLOT] = parameter.detach().clone()

    optimizer.register_step_pre_hook(keep)
    optimizer.register_step_post_hook(update)
    return optimizer


def _weights(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def check_averages(average: Average | None, replica: Replica) -> None:
    """Raise where weights and their averages lie on different workers, and the averages are to be evaluated."""
    if average is not None and average.evaluated and not replica.placement.substitutes:
        raise InputError(
            "average: this strategy (hybrid, or --staleness) cannot evaluate averages in the place of the weights. Use "
            "single, dp, ddp, fsdp, pp or ps, or Average(..., evaluated=False)."
        )


@contextmanager
def averages_in_place(average: Average | None, replica: Replica) -> Iterator[None]:
    """Put the averages in the place of the weights, for the duration of the context."""
    if average is None or not average.evaluated:
        yield
        return
    pairs = list(_pairs(replica.optimizer))
    with replica.placement.substituted(lambda: _swap(pairs)):
        yield


def _pairs(optimizer: Optimizer) -> Iterator[tuple[Tensor, Tensor]]:
    for parameter in _weights(optimizer):
        slots = optimizer.state.get(parameter, {})
        if SLOT in slots:
            yield parameter, slots[SLOT]


@torch.no_grad()
def _swap(pairs: list[tuple[Tensor, Tensor]]) -> None:
    for weight, average in pairs:
        values = weight.detach().clone()
        weight.copy_(average)
        average.copy_(values)
