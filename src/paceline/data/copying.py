"""Copying a batch, so that work in place on one leaves the other alone: its tensors and arrays, and whatever holds them."""

from __future__ import annotations

import copy
import dataclasses
import sys
import weakref
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

LARGEST = 1 << 30
"""Bytes of tensors and arrays in an object of the user's own, above which it is no batch but what batches are made from."""
_VISITED = 10_000
"""How many values are visited to find them."""
_PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None)))
_FLAT = (bytearray, array)
_LISTS = (list, tuple, set, frozenset, deque)
_NEVER = (Dataset, nn.Module, type, FunctionType, ModuleType, np.generic)
"""What is no part of a batch, though it may hold tensors, and what nobody can change."""


def copied(batch: Any) -> Any:
    """Return a batch that shares no memory with this one: copies of tensors, arrays, and the containers around them.

    An object of another class is copied if it holds tensors or arrays in its attributes, and else handed on as it is: a
    vocabulary, an open file, a data set.
    """
    return _Copies().of(batch)


class _Copies:
    """The copies made for one batch; what is in it twice is copied once."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Any, Any]] = {}
        """By identity, each with what it is a copy of, which keeps that alive."""
        self._memo: dict[int, Any] = {}
        """What deepcopy knows; it must live as long, for it holds an entry that is keyed by where it lies itself."""

    def of(self, part: Any) -> Any:
        """Return the copy of a part."""
        if type(part) in _PLAIN or isinstance(part, _NEVER):
            return part
        if id(part) in self._made:
            return self._made[id(part)][1]
        try:
            return self._note(part, self._copy(part))
        except Exception:  # noqa: BLE001 - whatever a class of the user's raises, or too deep a chain of objects
            return self._note(part, part)

    def _copy(self, part: Any) -> Any:
        if isinstance(part, Tensor):
            made: Any = self._tensor(part)
        elif isinstance(part, np.ndarray) or _is_array(part):
            made = self._array(part)
        elif isinstance(part, _FLAT):
            made = copy.copy(part)
        elif isinstance(part, _LISTS):
            made = self._members(part)
        elif isinstance(part, dict) or (isinstance(part, Mapping) and not hasattr(part, "__dict__")):
            made = self._mapping(part)
        elif dataclasses.is_dataclass(part) or _holds_batch(part):
            made = self._object(part)
        else:
            made = part
        return made

    def _note(self, part: Any, made: Any) -> Any:
        self._made[id(part)] = part, made
        return made

    def _tensor(self, part: Tensor) -> Tensor:
        # deepcopy refuses what has a graph, and copies all the memory that a view lies in: a whole dataset, maybe.
        if part.grad_fn is not None or (
            part.layout is torch.strided
            and part.untyped_storage().nbytes() > 2 * part.numel() * part.element_size()
        ):
            return part.detach().clone()
        made: Tensor = copy.deepcopy(part, self._memo)
        return made

    def _array(self, part: Any) -> Any:
        if isinstance(part, np.ndarray) and part.dtype.kind == "O":
            made = part.copy()
            for place, member in np.ndenumerate(part):
                made[place] = self.of(member)
            return made
        return copy.deepcopy(part, {})

    def _members(self, part: Any) -> Any:
        if isinstance(part, list | deque):
            made = self._note(part, copy.copy(part))
            if not _is_plain(part):
                for place, member in enumerate(part):
                    made[place] = self.of(member)
            return self._attributes(part, made)
        members = part if _is_plain(part) else list(map(self.of, part))
        # A subclass may take other arguments than its members.
        base: Any = next(one for one in (tuple, frozenset, set) if isinstance(part, one))
        try:
            made = base.__new__(type(part), members)
        except TypeError:  # one of those that are made in C
            made = type(part)(members)
        if base is set:
            set.update(made, members)
        getattr(made, "__dict__", {}).update(getattr(part, "__dict__", {}))
        return self._attributes(part, self._note(part, made))

    def _mapping(self, part: Mapping[Any, Any]) -> Any:
        # A subclass may hold more than its members, as defaultdict does.
        made = self._note(part, copy.copy(part) if isinstance(part, dict) else dict(part))
        if not _is_plain(part.values()):
            for key, member in part.items():
                made[key] = self.of(member)
        return self._attributes(part, made)

    def _object(self, part: Any) -> Any:
        if hasattr(type(part), "__deepcopy__"):
            # It knows best; but of its tensors some are not to be copied by it.
            memo = {id(one): self.of(one) for one in _reached(part) if isinstance(one, Tensor)}
            return copy.deepcopy(part, memo)
        made = copy.copy(part)
        return part if made is part else self._attributes(part, self._note(part, made))

    def _attributes(self, part: Any, made: Any) -> Any:
        """Give a copy its own attributes."""
        for name, value in _attributes_of(part):
            if (new := self.of(value)) is value:
                continue
            if name in getattr(made, "__dict__", {}):
                vars(made)[name] = new
            else:
                object.__setattr__(made, name, new)  # of frozen ones, too
        return made


def _attributes_of(part: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an object, those in slots included."""
    yield from getattr(part, "__dict__", {}).items()
    for kind in type(part).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__") and hasattr(part, name):
                yield name, getattr(part, name)


_HANDED_ON: dict[int, tuple[weakref.ref[Any], list[Any]]] = {}
"""Objects that were found to be no part of a batch, with what they looked like: a vocabulary takes long to walk through."""


def _holds_batch(part: Any) -> bool:
    """Return whether an object holds tensors or arrays, and no more of them and of other values than a batch has."""
    outline = [
        (name, id(value), len(value) if isinstance(value, (*_LISTS, dict)) else 0)
        for name, value in _attributes_of(part)
    ]
    known = _HANDED_ON.get(id(part))
    if known is not None and known[0]() is part and known[1] == outline:
        return False
    held = length = 0
    for number, one in enumerate(_reached(part, _VISITED + 1)):
        if number > _VISITED:
            held = 0
            break
        length += len(one) if isinstance(one, (*_LISTS, dict)) else 1
        if isinstance(one, Tensor):
            held += one.numel() * one.element_size()
        elif isinstance(one, np.ndarray) or _is_array(one):
            size = getattr(one, "nbytes", None)
            held += size if isinstance(size, int) and size else 1
        elif isinstance(one, _FLAT):
            held += len(one)
    if 0 < held <= LARGEST:
        return True
    if length > _VISITED:
        with suppress(TypeError):  # some can have no weak reference
            _HANDED_ON[id(part)] = weakref.ref(part, partial(_forget, id(part))), outline
    return False


def _forget(place: int, gone: weakref.ref[Any]) -> None:
    if place in _HANDED_ON and _HANDED_ON[place][0] is gone:
        del _HANDED_ON[place]


def _reached(part: Any, most: int = sys.maxsize) -> Iterator[Any]:
    """Yield everything that an object holds, in containers and other objects too; beyond so many values some of them."""
    seen, left = {id(part)}, [part]
    while left:
        one = left.pop()
        yield one
        if isinstance(one, (Tensor, np.ndarray, *_FLAT)):
            continue
        members: Iterable[Any] = (value for _, value in _attributes_of(one))
        inside = one.values() if isinstance(one, dict) else one if isinstance(one, _LISTS) else ()
        for member in members if _is_plain(inside) else chain(members, inside):
            if type(member) not in _PLAIN and not isinstance(member, _NEVER) and id(member) not in seen:
                seen.add(id(member))
                left.append(member)
                if len(seen) > most:
                    break


def _is_plain(members: Any) -> bool:
    """Return whether there is nothing to copy among members; said fast, for there may be millions of them."""
    return _PLAIN.issuperset(map(type, members))


def _is_array(part: Any) -> bool:
    """Return whether an object is an array of another library's: a table, a picture."""
    kind = type(part)
    return hasattr(kind, "__array__") or hasattr(kind, "__array_interface__")
