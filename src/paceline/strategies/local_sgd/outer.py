"""The outer optimizer of local SGD: Nesterov momentum on the mean change of a period, as in DiLoCo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.compat import foreach
from paceline.strategies.tuning import Tuning

SLOT = "outer_momentum"


class Nesterov:
    """Where the parameters stood at the last average, and the momentum of the averages."""

    def __init__(self, parameters: Sequence[nn.Parameter], tuning: Tuning) -> None:
        self._parameters = parameters
        self._rate, self._momentum = tuning.outer_lr, tuning.outer_momentum
        self.anchors = [parameter.detach().clone() for parameter in parameters]
        self.momenta = [torch.zeros_like(parameter) for parameter in self.anchors]

    @torch.no_grad()
    def start(self) -> None:
        """Begin a period where the parameters stand."""
        foreach.copy_(self.anchors, [parameter.detach() for parameter in self._parameters])

    def tensors(self) -> list[Tensor]:
        """Return what all workers have in common."""
        return [*self.anchors, *self.momenta]

    def changes(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return how far this worker's parameters have come since the last average."""
        pairs = zip(parameters, self.anchors, strict=True)
        return [parameter.detach() - anchor for parameter, anchor in pairs]

    @torch.no_grad()
    def step(self, changes: Sequence[Tensor]) -> None:
        """Move the anchors by the mean change of all workers: SGD whose gradient is its opposite."""
        moved = [change.to(anchor.dtype) for change, anchor in zip(changes, self.anchors, strict=True)]
        foreach.mul_(self.momenta, self._momentum)
        foreach.add_(self.momenta, moved)
        foreach.add_(self.anchors, moved, alpha=self._rate)
        foreach.add_(self.anchors, self.momenta, alpha=self._rate * self._momentum)

    def put_into(self, slots: dict[str, dict[str, Any]], names: Sequence[str]) -> None:
        """Add the momentum to the slots of an optimizer's state, where there is any.

        A parameter that was never updated has no slots, and some optimizers take the first for a sign that all are there.
        """
        for name, momentum in zip(names, self.momenta, strict=True):
            if momentum.any():
                slots.setdefault(name, {})[SLOT] = momentum

    @torch.no_grad()
    def take_from(self, slots: dict[str, dict[str, Any]], names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Load the momentum, and return the slots without it."""
        for name, momentum in zip(names, self.momenta, strict=True):
            saved = slots.get(name, {}).get(SLOT)
            momentum.zero_() if saved is None else momentum.copy_(saved)
        return {
            name: {slot: value for slot, value in held.items() if slot != SLOT}
            for name, held in slots.items()
        }
