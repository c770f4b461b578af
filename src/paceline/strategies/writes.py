"""Finds weights that a forward pass writes to: replicas that see other samples would part, and gathered weights are thrown away.

torch counts writes in place, but not those through `.data`. An assignment to `.data` gives a parameter other memory; a
write into it (`.data.mul_`) leaves no trace but the values, which are compared in the steps 1, 2, 4, 8 and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from paceline.errors import InputError

_VERSION = attrgetter("_version")


class Writes:
    """Compares the parameters of one model between the beginning of a step and its update."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        held = dict(named)
        self._names, self._parameters = list(held), list(held.values())
        self._place: Callable[[Tensor], int] = (
            place_of if any(map(_is_cut, self._parameters)) else Tensor.data_ptr
        )
        self._places: list[int] = []
        self._memory: list[Any] = []
        """Memory of the parameters, kept so that none of it is given out again while a step lasts."""
        self._before: list[int] = []
        self._sums: Tensor | None = None
        self._steps = 0

    def begin(self) -> None:
        """Note how often each was written to when the step begins, where it lies and, now and then, what it is."""
        self._before = list(map(_VERSION, self._parameters))
        places = list(map(self._place, self._parameters))
        if places != self._places:
            self._places, self._memory = places, [one.untyped_storage() for one in self._parameters]
        self._steps += 1
        self._sums = sums_of(self._parameters) if self.looks else None

    @property
    def looks(self) -> bool:
        """Whether values are compared in this step: now and then, because each look reads them all."""
        return self._steps & (self._steps - 1) == 0

    def check(self, number: int, *, counted: bool = True) -> None:
        """Raise where one was written to since, before the optimizer did; without `counted` only past torch's count."""
        if not self._before:
            return
        sums, self._sums = self._sums, None
        versions, places = list(map(_VERSION, self._parameters)), list(map(self._place, self._parameters))
        if counted and versions != self._before:
            refuse_writes(self._names[_first(versions, self._before)], f"step {number}")
        if places != self._places:
            refuse_writes(self._names[_first(places, self._places)], f"step {number}")
        if sums is not None and (changed := differing(sums, sums_of(self._parameters))):
            silent = [place for place in changed if versions[place] == self._before[place]]
            if silent:
                refuse_writes(self._names[silent[0]], f"step {number}")


def refuse_writes(name: str, when: str) -> NoReturn:
    """Raise for a parameter that a pass, or the loop around it, has written to."""
    raise InputError(
        f"{when}: the forward or backward pass, or the loop before step.apply(), wrote to the weights of {name} (an nn.Embedding "
        "with max_norm does, a mean teacher that moves in forward, SAM), and each worker sees other samples, so their weights "
        "would part. Change weights after step.apply(), or use --strategy single."
    )


def place_of(tensor: Tensor) -> int:
    """Return what changes where a tensor is given other memory, one that has none of its own (a DTensor) included."""
    place: int = tensor.untyped_storage()._cdata  # noqa: SLF001
    return place


def sums_of(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return one number for each tensor that tells different values apart; nobody waits for a GPU here."""
    return torch.stack([_sum(getattr(one, "_local_tensor", one)) for one in tensors]) if tensors else None


def differing(before: Tensor | None, now: Tensor | None) -> list[int]:
    """Return the places in which sums differ."""
    if before is None or now is None or torch.equal(before, now):
        return []
    return [int(place) for place in (before != now).nonzero()]


def checksum(tensor: Tensor) -> int:
    """Return a number that tells different values apart, in one pass and without a copy."""
    return int(_sum(tensor))


def _sum(tensor: Tensor) -> Tensor:
    plain = tensor.detach()
    plain = torch.view_as_real(plain) if plain.is_complex() else plain
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[plain.element_size()]
    return plain.contiguous().view(whole).sum(dtype=torch.int64)


def _first(now: list[int], before: list[int]) -> int:
    return next(place for place, (one, other) in enumerate(zip(now, before, strict=True)) if one != other)


def _is_cut(tensor: Tensor) -> bool:
    return hasattr(tensor, "_local_tensor")
