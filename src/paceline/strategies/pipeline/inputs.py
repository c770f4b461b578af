"""Follows what a forward pass writes into its own arguments: the loss may read them after it, on the worker of the last stage.

What the first stage writes into tensors is handed on, and stands in the arguments of the last one when its pass ends; what it
does to lists, dicts and plain values is refused. Behind a cut a forward pass has stand-ins for its arguments, so whatever it
writes there would be lost: it is refused as well. Tensors are compared by value, because torch counts no write through `.data`
or numpy; on a GPU, which has to be waited for, now and then (passes 1, 2, 4, 8 and so on), and always once that found one.
"""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from paceline.compat.pytree import tree_flatten
from paceline.compat.tensors import storage_key, write_count
from paceline.errors import InputError
from paceline.strategies.guards.same_values import differing_bits, parts_of

Changed = Mapping[int, tuple[Tensor, bool]]
"""New values of arguments by their place among the tensors of a call, and whether they lie in other memory than before."""
_ATOMS = (type(None), int, float, complex, bool, str, bytes)
_WHOLE = (*_ATOMS, Tensor, type, types.FunctionType, types.ModuleType, nn.Module, torch.device, torch.dtype)
"""What nobody looks into."""


@dataclass
class InputComparison:
    """Which passes of a stage compare tensors of a GPU by value."""

    passes: int = 0
    always: bool = False

    def begin(self) -> bool:
        """Count a forward pass that begins; return whether it is one to watch."""
        self.passes += 1
        return self.always or self.passes & (self.passes - 1) == 0


class _Watched:
    """Tensors in the memory of the model's arguments, as they were at one moment."""

    def __init__(self, held: Sequence[Tensor], watch: InputComparison | None) -> None:
        """`watch` has values compared, too."""
        self._held, self._watch = held, watch
        self._forms = [_form(one) for one in held]
        # Kept, so that none of it is given out again meanwhile.
        self._memory = [one.untyped_storage() for one in held if one.layout is torch.strided]
        looks = watch is not None and watch.begin()
        self._before = {
            place: [part.clone() for part in parts_of(one)]
            for place, one in enumerate(held)
            if watch is not None and (looks or one.device.type == "cpu")
        }

    def written(self) -> dict[int, bool]:
        """Return the places of those that were written to, and whether each lies in other memory now."""
        found: dict[int, bool] = {}
        for place, (one, (counted, *form)) in enumerate(zip(self._held, self._forms, strict=True)):
            now, *formed = _form(one)
            if now != counted or formed != form:
                found[place] = formed != form
        silent = [place for place in self._before if place not in found]
        parts = [(place, part) for place in silent for part in parts_of(self._held[place])]
        before = [part for place in silent for part in self._before[place]]
        for number in differing_bits([part for _, part in parts], before):
            found[parts[number][0]] = False
            if self._watch is not None:
                self._watch.always = True
        return found

    def tensors(self) -> list[Tensor]:
        """Return them."""
        return list(self._held)

    def touched(self) -> bool:
        """Return whether anything was written to at all."""
        return bool(self.written())

    def check(self) -> None:
        """Raise where a stage after the first has written to them."""
        if self.touched():
            _refuse("writes, after a cut of the pipeline, into its arguments or what it also has elsewhere,")

    def shared_with(self, tensors: Sequence[Tensor]) -> list[bool]:
        """Return which of some tensors lie in the same memory, or in that of another one of them."""
        memory = Counter({_memory(one) for one in self._held})
        memory.update(map(_memory, tensors))
        return [memory[_memory(one)] > 1 for one in tensors]


class Inputs(_Watched):
    """The arguments of one call of the model, as they were when it began."""

    def __init__(self, call: Any, watch: InputComparison | None = None, *, objects: bool = False) -> None:
        """`watch` has values compared, too; `objects` has objects looked into that torch's trees take for leaves."""
        self._call, self._objects = call, objects
        self._leaves, self._specs = _flattened(call, objects)
        super().__init__([leaf for leaf in self._leaves if isinstance(leaf, Tensor)], watch)

    def changed(self) -> dict[int, tuple[Tensor, bool]]:
        """Return the tensors that were written to since; containers that hold anything else are refused."""
        if self._rearranged():
            _refuse("puts other values into the batch that it is given, or takes some out,")
        found, tensors = self.written(), self._held
        if any(tensors[place].requires_grad for place in found):
            _refuse("writes into an argument that takes a gradient,")
        if any(tensors[place].layout is not torch.strided for place in found):
            _refuse("writes into a sparse argument,")
        return {place: (tensors[place].detach(), moved) for place, moved in found.items()}

    def _rearranged(self) -> bool:
        """Return whether containers and objects among the arguments hold something else now."""
        leaves, specs = _flattened(self._call, self._objects)
        return specs != self._specs or not all(map(_same, leaves, self._leaves))

    def write(self, changed: Changed) -> None:
        """Write into the arguments what the first stage has made of them."""
        with torch.no_grad():
            for place, (value, moved) in changed.items():
                one = self._held[place]
                if moved:
                    one.data = value
                else:
                    one.copy_(value)

    def touched(self) -> bool:
        """Return whether anything was written to at all, containers included."""
        return self._rearranged() or super().touched()


class Received(_Watched):
    """What came from the stage before, as far as others lay in the same memory there: the model's own arguments, views."""

    def __init__(
        self, tensors: Sequence[Tensor], elsewhere: Sequence[bool], watch: InputComparison | None = None
    ) -> None:
        super().__init__([one for one, shared in zip(tensors, elsewhere, strict=True) if shared], watch)


def _form(tensor: Tensor) -> tuple[Any, ...]:
    """Return how often a tensor was written to, and how it lies in which memory."""
    version = 0 if tensor.is_inference() else write_count(tensor)
    if tensor.layout is not torch.strided:
        return version, tensor.shape, tensor.dtype
    return (version, tensor.shape, tensor.dtype, tensor.stride(), tensor.storage_offset(), _memory(tensor))


def _flattened(value: Any, objects: bool) -> tuple[list[Any], list[Any]]:
    """Return the leaves of a nest, and the forms of its containers."""
    leaves, spec = tree_flatten(value)
    specs: list[Any] = [spec]
    seen: set[int] = set()
    for leaf in leaves if objects else ():
        if isinstance(leaf, _WHOLE) or id(leaf) in seen:
            continue
        seen.add(id(leaf))
        inner, spec = tree_flatten(_inside(leaf))
        leaves += inner  # which are looked into in their turn
        specs.append(spec)
    return leaves, specs


def _inside(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        return leaf.tobytes()
    if isinstance(leaf, set | frozenset):
        return frozenset(leaf)
    slots = [name for kind in type(leaf).__mro__ for name in getattr(kind, "__slots__", ())]
    return {**getattr(leaf, "__dict__", {}), **{name: getattr(leaf, name, None) for name in slots}}


def _same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and type(one) in (*_ATOMS, frozenset) and one == other)


def is_transparent(leaf: Any) -> bool:
    """Return whether a leaf is nothing that could be written to unseen."""
    return isinstance(leaf, _WHOLE)


def _memory(tensor: Tensor) -> int:
    return storage_key(tensor.untyped_storage()) if tensor.layout is torch.strided else id(tensor)


def _refuse(what: str) -> NoReturn:
    raise InputError(
        f"the model's forward pass {what} and under pp a loss that reads the batch after it, on another worker, would not see "
        "that. Work on a copy (x = x * 2, not x.mul_(2)), or use another strategy."
    )
