"""Auxiliary terms of a loss: each is divided by the global weight of its own before it is added.

Their gradients are kept apart from the main term's, because only after the whole global batch is the weight
known that each must be divided by. A task without such terms pays nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from paceline.compat import foreach
from paceline.errors import InputError
from paceline.reduce.packing import Packing
from paceline.reduce.tree import Gradients, add
from paceline.strategies.gradients import loss_entry, own
from paceline.task import Loss


def check_terms(terms: list[str], before: list[str]) -> None:
    """Raise where the terms of a loss are not those it had before: workers that see other batches know nothing of them."""
    if terms != before:
        raise InputError(
            f"the loss has the auxiliary terms {terms}, but had {before} before. Give every term with each batch, from the "
            "first on; where it has nothing to say, with the weight 0: Loss(0 * outputs.sum(), 0)."
        )


class Auxiliary:
    """The gradients, totals and weights of the auxiliary terms of one step.

    They travel as one flat list: for each term, the gradient of every parameter and then (total, weight).
    """

    def __init__(self, parameters: Sequence[nn.Parameter], kind: torch.dtype = torch.float32) -> None:
        """`kind` is the type of totals and weights: that of the main term's."""
        self._parameters = list(parameters)
        self.kind = kind
        self.names: list[str] = []
        """Terms of this task, once seen: a worker without a sample in some step still takes part for them."""
        self.agreed = False
        """Whether all workers have agreed on the names, so that no new one may come."""
        self._held: Gradients = []

    def backward(self, terms: Mapping[str, Loss], scale: Callable[[torch.dtype], Tensor], size: int) -> None:
        """Add one batch's gradients of each term; the graph stays for the main term."""
        if not self.agreed:
            self.names = self.names or sorted(terms)
        check_terms(sorted(terms), self.names)
        made: Gradients = []
        for name in self.names:
            loss = terms[name]
            found: Gradients = [None] * len(self._parameters)  # of a term that has nothing to say here
            if loss.total.requires_grad:
                found = list(
                    torch.autograd.grad(
                        loss.total,
                        self._parameters,
                        scale(loss.total.dtype),
                        retain_graph=True,
                        allow_unused=True,
                    )
                )
            made += map(own, found, self._parameters)
            made.append(loss_entry(loss, size, self.kind))
        self._held = add(self._held, made) if self._held else made

    def over(self, parameters: Sequence[nn.Parameter]) -> Auxiliary:
        """Return the same terms over other parameters, with no gradients yet."""
        made = Auxiliary(parameters, self.kind)
        made.names, made.agreed = self.names, self.agreed
        return made

    def reached(self, flat: Gradients | None = None) -> list[list[bool]]:
        """Return for each term which parameters it has a gradient for: in what is held now, or in a flat list."""
        held, stride = self._held if flat is None else flat, len(self._parameters) + 1
        rows = [held[stride * term : stride * (term + 1) - 1] for term in range(len(self.names))]
        return [[one is not None for one in row] or [False] * (stride - 1) for row in rows]

    def take(self) -> Gradients:
        """Return the flat list gathered since the last call."""
        held, self._held = self._held, []
        return held

    def give(self, summed: Gradients) -> None:
        """Put back the flat list, summed over the whole global batch."""
        self._held = summed

    def packing(self) -> Packing:
        """Return how the flat list travels to other workers."""
        parameters = self._parameters
        entry = torch.zeros(2, dtype=self.kind, device=parameters[0].device)
        return Packing([*parameters, entry] * len(self.names))

    def doubtful(self, lists: Sequence[Gradients]) -> list[bool]:
        """Return for each place of the list whether only another worker can know of a gradient: none of `lists` has one there,
        nor has the main term."""
        length = (len(self._parameters) + 1) * len(self.names)
        seen = [False] * length
        for held in lists:
            seen = [
                known or one is not None for known, one in zip(seen, held or [None] * length, strict=True)
            ]
        bare = [*(parameter.grad is None for parameter in self._parameters), False] * len(self.names)
        return [not known and alone for known, alone in zip(seen, bare, strict=True)]

    def unreached(self) -> list[int]:
        """Return the places of parameters that neither the main term nor any of these gave a gradient."""
        stride = len(self._parameters) + 1
        return [
            place
            for place, parameter in enumerate(self._parameters)
            if parameter.grad is None and all(one is None for one in self._held[place::stride])
        ]

    def entries(self) -> dict[str, Tensor]:
        """Return (total, weight) of each term that had any part in this step."""
        stride = len(self._parameters) + 1
        ends = zip(self.names, self._held[stride - 1 :: stride], strict=False)
        return {name: entry for name, entry in ends if entry is not None}

    def merge(self, size: int, factor: Tensor | float) -> None:
        """Add the terms into `.grad`, each over its own weight; the main term is multiplied by `factor` first."""
        stride = len(self._parameters) + 1
        main = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        if main:
            foreach.mul_(main, factor)
        for start in range(0, len(self._held), stride):
            *gradients, entry = self._held[start : start + stride]
            if entry is None:
                continue
            # A term without any weight in this step has nothing to say.
            share = torch.where(entry[1] != 0, size / entry[1], 0.0)
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                if gradient is not None:
                    gradient.mul_(share)
                    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self._held = []
