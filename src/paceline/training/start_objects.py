"""What becomes of objects that nobody compares: which were replaced, used or written to, and so are in no checkpoint."""

from __future__ import annotations

import itertools
import random
import types
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.compat.tensors import write_count
from paceline.strategies.guards.reached import CLOSED, ITERATORS, attributes_of, is_own, place_of
from paceline.training.attribute_refusals import Key
from paceline.training.held_objects import HELD

_LONG, _DEEP = 10_000, 3
"""How many items of a long table are looked at for a change, and how many objects may lie one in the other."""
_SAMPLED = 1 << 20
"""How many bytes of an array are looked at."""
_PLAIN = (bool, int, float, str)


class StartObjects:
    """What attributes held when the steps began, or held first: which of it was replaced, used or written to since."""

    def __init__(self, owners: Mapping[str, Any], objects: Mapping[Key, Any]) -> None:
        """`owners` are those whose plain attributes are compared; what the model is made of is none of its objects."""
        self._owners = owners
        self._refs = {key: _reference(one) for key, one in objects.items()}
        self._states: dict[Key, _State] = {}
        self._replaced: set[Key] = set()
        self._look_at(objects)

    def _look_at(self, objects: Mapping[Key, Any]) -> None:
        known = {id(one) for one in self._owners.values()}
        for name, owner in self._owners.items():
            if isinstance(owner, nn.Module) and HELD not in name:
                known.update(map(id, _own_tensors(owner)))
        for key, one in objects.items():
            if not isinstance(one, CLOSED) and (state := _State(one, known)).sees:
                self._states[key] = state

    def add(self, objects: Mapping[Key, Any]) -> None:
        """Look from now on at what has come to be."""
        new = {key: one for key, one in objects.items() if key not in self._refs}
        self._refs |= {key: _reference(one) for key, one in new.items()}
        self._look_at(new)

    def rebase(self, objects: Mapping[Key, Any], replaced: Collection[Key]) -> None:
        """Go by what there is where modules were made anew; what was replaced before that stays so."""
        self._replaced |= set(replaced)
        self._refs = {key: _reference(objects[key]) for key in self._refs if key in objects}

    def replaced(self, objects: Mapping[Key, Any], plain: Collection[Key]) -> set[Key]:
        """Return what is another object by now, or none, and no plain value either."""
        now = {
            key
            for key, was in self._refs.items()
            if key not in plain and (key not in objects or objects[key] is not was())
        }
        return now | self._replaced

    def used(self, objects: Mapping[Key, Any]) -> set[Key]:
        """Return which generators and iterators have come further, and which tables, tensors and layers hold something else."""
        return {
            key
            for key, state in self._states.items()
            if key in objects and objects[key] is self._refs[key]() and state.has_moved(objects[key])
        }


def holds_values(one: Any) -> bool:
    """Return whether a table holds numbers or text: somebody may count in it, it is not made again as a cache is."""
    if not isinstance(one, dict | list | set | deque):
        return False
    return any(type(each) in _PLAIN for each in islice(one.values() if isinstance(one, dict) else one, _LONG))


class _State:
    """What there was in an object, as far as anybody can see it change."""

    def __init__(self, one: Any, known: Collection[int]) -> None:
        """`known` are objects that are compared elsewhere, by their ids."""
        self._known = known
        self._seen = self._look(one)
        tensors = (tensor for tensor in _tensors_in(one, _DEEP) if id(tensor) not in known)
        self._tensors = [(weakref.ref(one), _writes(one)) for one in tensors]

    @property
    def sees(self) -> bool:
        """Whether there is anything to see."""
        return self._seen is not None or bool(self._tensors)

    def has_moved(self, one: Any) -> bool:
        """Return whether it was used or written to."""
        if self._look(one) != self._seen:
            return True
        return any(
            (tensor := reference()) is not None and _writes(tensor) != count
            for reference, count in self._tensors
        )

    def _look(self, one: Any) -> Any:
        found = _seen(one, self._known, _DEEP)
        return None if found is None else hash(repr(found))


def _seen(one: Any, known: Collection[int], deep: int) -> Any:
    """Return how far a generator of numbers, or an iterator, has come, and what there is in a table or an object."""
    if id(one) in known or not deep:
        return None
    if isinstance(one, dict | list | tuple | deque):
        pairs: Iterable[Any] = one.items() if isinstance(one, dict) else enumerate(one)
        return len(one), [
            (repr(key)[:80], value if type(value) in _PLAIN else _seen(value, known, deep - 1))
            for key, value in islice(pairs, _LONG)
        ]
    for kinds, look in _LOOKS:
        if isinstance(one, kinds):
            return look(one)
    if not is_own(type(one)):
        return None
    held = {name: value for name, value in attributes_of(one).items() if name[0] != "_"}
    return _seen(held, known, deep) if held else None


def _of_array(one: Any) -> Any:
    sample = one.reshape(-1)[:: max(1, one.nbytes // _SAMPLED)]
    return None if one.dtype.hasobject else zlib.crc32(np.ascontiguousarray(sample).tobytes())


_LOOKS: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (
        (nn.Module, type, types.ModuleType, Tensor),
        lambda _: None,
    ),  # of layers what is plain is compared elsewhere
    (np.ndarray, _of_array),
    (random.Random, random.Random.getstate),
    (torch.Generator, lambda one: one.get_state().numpy().tobytes()),
    (np.random.Generator, lambda one: one.bit_generator.state),
    (np.random.RandomState, lambda one: one.get_state(legacy=False)),
    (types.GeneratorType, lambda one: one.gi_frame is None or one.gi_frame.f_lasti),
    ((*ITERATORS, itertools.count), place_of),
)
"""How to see that something was used."""


def _tensors_in(one: Any, deep: int) -> Iterator[Tensor]:
    if isinstance(one, Tensor):
        yield one
    elif isinstance(one, nn.Module):
        yield from itertools.chain(one.parameters(), one.buffers())
    elif deep and isinstance(one, dict | list | tuple | deque):
        for value in islice(one.values() if isinstance(one, dict) else one, _LONG):
            yield from _tensors_in(value, deep - 1)


def _own_tensors(module: nn.Module) -> Iterator[Tensor]:
    return itertools.chain(module.parameters(recurse=False), module.buffers(recurse=False))


def _writes(tensor: Tensor) -> int:
    """Return how often torch has counted a write to a tensor; it counts none in inference mode."""
    return 0 if tensor.is_inference() else write_count(tensor)


def _reference(one: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(one)
    except TypeError:
        return lambda: one
