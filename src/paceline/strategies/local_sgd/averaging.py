"""Means over workers that have gone their own ways: of tensors, and of optimizers' state. The same bits for everybody."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.reduce.post_backward import PostBackwardReduce, open_exchange
from paceline.reduce.tree import TreeSum
from paceline.state.optimizer_state import load_optimizer_state, optimizer_state
from paceline.world import World, all_gather_object
from paceline.world.status_page import Phase

Key = tuple[str, str, tuple[int, ...], torch.dtype]
"""A tensor of an optimizer's state: parameter, slot, shape and type."""


class Averaging:
    """Sums in which each worker has one share, in the order of their ranks."""

    def __init__(self, world: World, transport: str) -> None:
        self.world = replace(world, shares=None)
        """The workers as equals, however many shards each carries."""
        self._post_backward = PostBackwardReduce(self.world, world.size, transport)
        # Beside the other, which reads back what has come: that would keep a GPU waiting in every step.
        self._exchange = open_exchange(self.world, world.size, transport) if world.size > 1 else None

    def sum_small(self, values: Tensor) -> Tensor:
        """Add up one small tensor of each worker, in place."""
        if self._exchange is not None:
            flat = values.view(-1)
            self._exchange.start(0, [flat], flat, lambda: None)
            before = self.world.status_page.enter(Phase.COMMUNICATION)
            self._exchange.finish()
            self.world.status_page.enter(before)
        return values

    def sum(self, shares: list[Tensor]) -> list[Tensor]:
        """Add up what each worker brings; the next call may write over what this one gave."""
        if not shares:
            return []
        rank = self.world.rank
        tree = TreeSum(self.world.size)
        tree.add((rank, rank + 1), list(shares))
        summed = self._post_backward.sum(tree, shares)
        return [mine if total is None else total for mine, total in zip(shares, summed, strict=True)]

    @torch.no_grad()
    def average_optimizers(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Average the state of all optimizers; a count becomes the largest.

        A worker that has had no sample has no state yet: it gets the others'.
        """
        mine = optimizer_state(model, optimizer)
        found: list[dict[Key, float]] = all_gather_object(self.world.comm, _describe(mine["state"]))
        every = sorted({key for one in found for key in one}, key=lambda key: (key[:3], str(key[3])))
        state: dict[str, dict[str, Any]] = {name: dict(slots) for name, slots in mine["state"].items()}
        # Of a parameter that is one number, what is kept for its value is one number too.
        numbers = {name for name, one in model.named_parameters() if not one.dim()}
        counts = [
            key
            for key in every
            if not key[2] and not key[3].is_complex and (key[0] not in numbers or key[1] == "step")
        ]
        large = [key for key in every if key not in counts]
        shares = []
        for key in large:
            name, slot, shape, dtype = key
            held = state.get(name, {}).get(slot)
            value = torch.zeros(shape, dtype=dtype, device=self.world.device) if held is None else held
            shares.append(wide(value) / sum(key in one for one in found))
        for (name, slot, _, dtype), mean in zip(large, self.sum(shares), strict=True):
            state.setdefault(name, {})[slot] = mean.to(dtype, copy=True)
        for key in counts:
            name, slot, _, dtype = key
            most = max(one[key] for one in found if key in one)
            state.setdefault(name, {})[slot] = torch.tensor(most, dtype=dtype)
        load_optimizer_state(model, optimizer, {**mine, "state": state})


def wide(value: Tensor) -> Tensor:
    """Return a tensor in a type that means can be taken in."""
    if value.is_complex():
        return value.detach().to(torch.promote_types(value.dtype, torch.complex64))
    return value.detach() if value.dtype.itemsize >= 4 else value.detach().float()


def _describe(state: dict[str, dict[str, Any]]) -> dict[Key, float]:
    """Return which tensors of numbers that have a mean there are, and the value of those that may be counts."""
    return {
        (name, slot, tuple(value.shape), value.dtype): 0.0
        if value.dim() or value.is_complex()
        else float(value)
        for name, slots in state.items()
        for slot, value in slots.items()
        if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex() or not value.dim())
    }
