"""Finds weights that a forward pass writes to: replicas that see other samples would part, and gathered weights are thrown away.

torch counts writes in place, but not those through `.data`. An assignment to `.data` gives a parameter other memory; a
write into it (`.data.mul_`) leaves no trace but the values. All of them are compared in the steps 1, 2, 4, 8 and so on, on a
CPU a few of each parameter in every step: that takes 0.4 ms for 300 parameters that train, 0.8 ms for 300 that are frozen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from paceline.compat.tensors import has_local_part, local_part, storage_key, write_count
from paceline.errors import InputError
from paceline.strategies.guards.same_values import bits

_WORD, _TILE = 8, 64
_PRIMES = 2654435761, 2246822519, 3266489917


class Writes:
    """Compares the parameters of one model between the beginning of a step and its update."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        held = dict(named)
        self._names, self._parameters = list(held), list(held.values())
        self._place: Callable[[Tensor], int] = (
            place_of if any(map(has_local_part, self._parameters)) else Tensor.data_ptr
        )
        self._places: list[int] = []
        self._memory: list[Any] = []
        """Memory of the parameters, kept so that none of it is given out again while a step lasts."""
        self._before: list[int] = []
        self._sums: Tensor | None = None
        self._samples = Samples(())
        self._sampled: list[Tensor] = []
        self._steps = 0
        self.looks = False
        """Whether all values are compared in this step: now and then, because each look reads them all."""

    def begin(self) -> None:
        """Note how often each was written to when the step begins, where it lies and what it is."""
        self._before = list(map(write_count, self._parameters))
        places = list(map(self._place, self._parameters))
        if places != self._places:
            self._places, self._memory = places, [one.untyped_storage() for one in self._parameters]
            self._samples = Samples(self._parameters)
        self._steps += 1
        self.looks = self._steps.bit_count() == 1
        self._sampled = self._samples.take()
        self._sums = sums_of(self._parameters) if self.looks else None

    def check(self, number: int, *, counted: bool = True) -> None:
        """Raise where one was written to since, before the optimizer did; without `counted` only past torch's count."""
        if not self._before:
            return
        sums, self._sums = self._sums, None
        versions, places = list(map(write_count, self._parameters)), list(map(self._place, self._parameters))
        if counted and versions != self._before:
            refuse_writes(self._names[_first(versions, self._before)], f"step {number}")
        if places != self._places:
            refuse_writes(self._names[_first(places, self._places)], f"step {number}")
        changed = self._samples.changed(self._sampled)
        if sums is not None:
            changed += differing(sums, sums_of(self._parameters))
        silent = [place for place in changed if versions[place] == self._before[place]]
        if silent:
            refuse_writes(self._names[min(silent)], f"step {number}")


class Samples:
    """A few numbers of each tensor, evenly spaced from the first to the last, that show a write to most of a tensor.

    More of a frozen one: nobody may write there. None of a tensor on a GPU: comparing them would make the CPU wait for it.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._views: dict[int, list[Tensor]] = {}
        """By the bytes of a number: single numbers of the tensors, seen as integers, for no two NaN are equal."""
        self._owners: dict[int, list[int]] = {}
        for owner, tensor in enumerate(tensors):
            held = bits(local_part(tensor))
            if held.device.type != "cpu":
                continue
            size = held.element_size()
            found = [held[index].view(1) for index in _spread(held.shape, 2 if tensor.requires_grad else 4)]
            self._views.setdefault(size, []).extend(found)
            self._owners.setdefault(size, []).extend([owner] * len(found))

    def take(self) -> list[Tensor]:
        """Return the sampled elements as they are now."""
        return [torch.cat(views) for views in self._views.values() if views]

    def changed(self, before: list[Tensor]) -> list[int]:
        """Return the places of tensors whose numbers are no longer what `take` gave before."""
        now = self.take()
        if all(map(torch.equal, before, now)):
            return []
        owners = [owners for owners in self._owners.values() if owners]
        return [
            held[place]
            for held, old, new in zip(owners, before, now, strict=True)
            for place in (old != new).nonzero().flatten().tolist()
        ]


def refuse_writes(name: str, when: str) -> NoReturn:
    """Raise for a parameter that a pass, or the loop around it, has written to."""
    raise InputError(
        f"{when}: the forward or backward pass, or the loop before step.apply(), wrote to the weights of {name} (an nn.Embedding "
        "with max_norm does, a mean teacher that moves in forward, SAM), and each worker sees other samples, so the weights "
        "would diverge. Change weights after step.apply(), or use --strategy single."
    )


def place_of(tensor: Tensor) -> int:
    """Return what changes where a tensor is given other memory, one that has none of its own (a DTensor) included."""
    return storage_key(tensor.untyped_storage())


def sums_of(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return one number for each tensor that tells different values apart; nobody waits for a GPU here."""
    return torch.stack([digest(local_part(one)) for one in tensors]) if tensors else None


def differing(before: Tensor | None, now: Tensor | None) -> list[int]:
    """Return the places in which sums differ."""
    if before is None or now is None or torch.equal(before, now):
        return []
    return [int(place) for place in (before != now).nonzero()]


def checksum(tensor: Tensor) -> int:
    """Return a number that tells different values apart, the same ones in another order included."""
    return int(digest(tensor))


def digest(tensor: Tensor) -> Tensor:
    """Return a sum of the numbers seen as integers, in which each has a weight that tells its place.

    They are added up in square tiles, along rows and along columns: what torch adds up quickly. 20 MB take 6 ms on one core.
    """
    flat = bits(tensor).contiguous().view(-1)
    numbers = _WORD // flat.element_size()
    if flat.storage_offset() % numbers:
        flat = flat.clone()  # several numbers are seen as one word, which begins where words do
    whole = flat.numel() // (_TILE * _TILE * numbers) * (_TILE * _TILE * numbers)
    rest = flat[whole:].to(torch.int64)
    total = (rest * _weights(len(rest), _PRIMES[0], flat.device)).sum()
    if whole:
        tiles = flat[:whole].view(torch.int64).view(-1, _TILE, _TILE)
        for axis, prime in zip((1, 2), _PRIMES[1:], strict=True):
            sums = tiles.sum(axis).view(-1)
            total += (sums * _weights(len(sums), prime, flat.device)).sum()
    return total


def _weights(count: int, prime: int, device: torch.device) -> Tensor:
    return torch.arange(1, count + 1, device=device) * prime | 1


def _spread(shape: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """Return the indices of up to `count` numbers of a tensor, evenly spaced from its first to its last."""
    last = math.prod(shape) - 1
    found = []
    for place in sorted({last * number // (count - 1) for number in range(count)} if last >= 0 else ()):
        index: list[int] = []
        for length in reversed(shape):
            place, inside = divmod(place, length)  # noqa: PLW2901
            index.insert(0, inside)
        found.append(tuple(index))
    return found


def _first(now: list[int], before: list[int]) -> int:
    return next(place for place, (one, other) in enumerate(zip(now, before, strict=True)) if one != other)
