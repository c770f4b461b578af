"""Auxiliary terms of a loss: each is divided by the global weight of its own before it is added.

Their gradients are kept apart from the main term's, because only after the whole global batch is the weight
known that each must be divided by. A task without such terms pays nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from paceline.errors import InputError
from paceline.strategies.tree import Gradients, add
from paceline.task import Loss


class Auxiliary:
    """The gradients, totals and weights of the auxiliary terms of one step.

    They travel as one flat list: for each term, the gradient of every parameter and then (total, weight).
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self.names: list[str] = []
        """Terms of this task, once seen: a worker without a sample in some step still takes part for them."""
        self._held: Gradients = []

    def backward(self, terms: Mapping[str, Loss], scale: Tensor) -> None:
        """Add one batch's gradients of each term; the graph stays for the main term."""
        self.names = self.names or sorted(terms)
        if sorted(terms) != self.names:
            raise InputError(
                f"the loss has the auxiliary terms {sorted(terms)}, but had {self.names} before."
            )
        made: Gradients = []
        for name in self.names:
            loss = terms[name]
            made += torch.autograd.grad(
                loss.total, self._parameters, scale, retain_graph=True, allow_unused=True
            )
            weight = torch.as_tensor(loss.weight, dtype=torch.float32, device=loss.total.device)
            made.append(torch.stack([loss.total.detach().float(), weight]))
        self._held = add(self._held, made) if self._held else made

    def take(self) -> Gradients:
        """Give the flat list gathered since the last call."""
        held, self._held = self._held, []
        return held

    def give(self, summed: Gradients) -> None:
        """Put back the flat list, summed over the whole global batch."""
        self._held = summed

    def empty(self) -> Gradients:
        """Give a flat list of zeros, for a worker that saw no sample."""
        return self.dense([None] * (len(self.names) * (len(self._parameters) + 1)))

    def dense(self, flat: Gradients) -> Gradients:
        """Give the list with zeros in the place of missing gradients, so that all workers' lists look alike."""
        device = self._parameters[0].device
        shapes = [*self._parameters, torch.zeros(2, device=device)] * len(self.names)
        return [
            torch.zeros_like(like) if held is None else held for held, like in zip(flat, shapes, strict=True)
        ]

    def merge(self, size: int, factor: Tensor | float) -> dict[str, Tensor]:
        """Add the terms into `.grad`, each over its own weight; the main term is multiplied by `factor` first.

        Gives (total, weight) of each term.
        """
        stride = len(self._parameters) + 1
        entries: dict[str, Tensor] = {}
        main = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        if main:
            torch._foreach_mul_(main, factor)
        for number, name in enumerate(self.names):
            *gradients, entry = self._held[number * stride : (number + 1) * stride]
            if entry is None:
                continue
            entries[name] = entry
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                if gradient is not None:
                    gradient.mul_(size / entry[1])
                    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self._held = []
        return entries
