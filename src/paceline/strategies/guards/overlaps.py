"""Refuses tensors of a model that lie in each other's memory: cut, moved or sent each by itself, they would part.

One process, dp and ddp update whole tensors where they lie, so there a write to one is a write to the other. One parameter
under two names is another matter: it is one tensor, and every strategy keeps it one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.compat.modules import parameters_of
from paceline.compat.tensors import has_local_part, storage_key
from paceline.errors import InputError
from paceline.strategies.guards.absent import present
from paceline.strategies.guards.refusals import plain_tensors


@dataclass(frozen=True, eq=False)
class _Window:
    """Where in memory a tensor lies."""

    name: str
    tensor: Tensor
    address_space: str
    """What its addresses count in: a device, or a storage without memory."""
    start: int
    end: int

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> _Window:
        storage, size = tensor.untyped_storage(), tensor.element_size()
        last = sum(
            (length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        # A tensor without memory (fake, on the meta device) has a storage to itself all the same.
        is_empty = storage.device.type == "meta"
        start = int(tensor.storage_offset()) * size + (0 if is_empty else storage.data_ptr())
        address_space = f"storage {storage_key(storage)}" if is_empty else str(storage.device)
        return cls(name, tensor, address_space, start, start + (last + 1) * size)

    def meets(self, other: _Window) -> bool:
        """Return whether a number of one is a number of the other: columns of one matrix may lie between each other."""
        unit = math.gcd(self.tensor.element_size(), other.tensor.element_size(), other.start - self.start)
        low, high = min(self.start, other.start), max(self.end, other.end)
        marks = torch.zeros((high - low) // unit, dtype=torch.bool)
        self.part_of(marks, low, unit).fill_(True)
        return bool(other.part_of(marks, low, unit).any())

    def part_of(self, marks: Tensor, low: int, unit: int) -> Tensor:
        """Return its numbers among marks, one for each `unit` of bytes from `low` on."""
        units = self.tensor.element_size() // unit
        strides = (*(stride * units for stride in self.tensor.stride()), 1)
        return marks.as_strided((*self.tensor.shape, units), strides, (self.start - low) // unit)


def refuse_overlaps(model: nn.Module, *, held: bool = False) -> None:
    """Raise where two tensors of a model overlap; with `held` for those in plain attributes, too, which nobody would move."""
    line = overlap_in(model, held=held)
    if line is not None:
        raise InputError(line)


def overlap_in(model: nn.Module, *, held: bool = False) -> str | None:
    """Return what to say of two tensors that overlap; None where there are none."""
    registered = [*_registered(model)]
    known = {id(tensor) for _, tensor in registered}
    plain = [(where, one) for where, one in _plain(model) if id(one) not in known] if held else []
    windows = [_Window.of(*one) for one in [*registered, *plain]]
    places = {window: place for place, window in enumerate(windows)}
    reaching: list[_Window] = []
    for window in sorted(windows, key=lambda one: (one.address_space, one.start)):
        reaching = [
            one for one in reaching if one.address_space == window.address_space and one.end > window.start
        ]
        for other in reaching:
            first, second = sorted((other, window), key=places.__getitem__)
            # Two plain attributes are the user's own affair.
            if places[first] < len(registered) and first.meets(second):
                return _line(first, second)
        reaching.append(window)
    return None


def _registered(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield what a state holds, each tensor once; a parameter that is registered as a buffer too is both."""
    for name, tensor in present([*model.named_parameters(), *model.named_buffers()]):
        if _has_window(tensor):
            yield name, tensor


def _plain(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for where, tensor in plain_tensors(model):
        path, _, name = where.rpartition(".")
        # torch's own spectral_norm and prune put what they make of `weight_orig` there, anew in every pass.
        if _has_window(tensor) and f"{name}_orig" not in parameters_of(model.get_submodule(path)):
            yield where, tensor


def _has_window(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.numel() > 0 and not has_local_part(tensor)


def _line(first: _Window, second: _Window) -> str:
    same = first.tensor.shape == second.tensor.shape and isinstance(second.tensor, nn.Parameter)
    instead = f"tie them ({second.name} = {first.name})" if same else f"take it from {first.name} in forward"
    return (
        f"{second.name} lies in the memory of {first.name} (.data, .detach(), a view), and this strategy cuts, moves or sends "
        f"each by itself, so that they would part. Write it otherwise: {instead}, or give it memory of its own (.clone()); or "
        "use --strategy single, dp, or ddp without --shard-optimizer."
    )
