"""Tells how far iterators and generators have come, without taking an item from one.

A generator stands at an instruction, with the variables that it goes on with and the iterators that it goes through. Left alone
are those from which none of it can be told apart from a count (`itertools.count`, iterators of a range), and whatever goes
through the batches themselves, around which progress bars and the like are wrapped. A letter of a text is drawn on a screen.
"""

from __future__ import annotations

import gc
import inspect
import itertools
import operator
from collections.abc import Iterable
from pathlib import Path
from types import GeneratorType
from typing import Any

from paceline.compat.data_loader import is_iterator
from paceline.strategies.guards.reached import Named, attributes_of, is_own
from paceline.training.checks.live_names import live_names, receiver

_OURS = f"{Path(__file__).parents[2]}/"
_PLAIN = (int, float, complex, bool, str, bytes, type(None))
_FULL: tuple[Iterable[Any], ...] = ([], (), {}, {}.values(), {}.items(), set(), reversed([]))
_SHOWING = tuple(type(iter(one)) for one in _FULL)
"""Iterators of Python that tell how many items they have left."""
_AROUND = (zip, map, filter, enumerate, *(one for one in vars(itertools).values() if isinstance(one, type)))
"""Those that go through others."""
_DEPTH = 4
NEW = "new"
"""The place of a generator from which nothing was taken yet."""
RECEIVES = "receives"
"""That of one which is sent values: a running mean, which goes on with what the loop has, and with nothing of its own."""


def iterators_among(visited: Iterable[Named]) -> list[Named]:
    """Return the iterators among some objects, and those that they go through, each with the name of where it was found."""
    found: dict[int, Named] = {}
    for name, one in visited:
        if isinstance(one, _AROUND) or is_watched(one):
            _collect(found, name, one, _DEPTH)
    return [*found.values()]


def _collect(found: dict[int, Named], name: str, one: Any, depth: int) -> None:
    if id(one) in found or not depth:
        return
    if is_watched(one):
        if leads_to_batches(one):
            return
        found[id(one)] = (name, one)
    for part in _parts(one):
        _collect(found, name, part, depth - 1)


def is_watched(one: Any) -> bool:
    """Return whether something is an iterator that may tell how far it has come."""
    return (
        isinstance(one, GeneratorType)
        or type(one) in _SHOWING
        or is_iterator(one)
        or (is_own(type(one)) and hasattr(type(one), "__next__"))
    )


def leads_to_batches(one: Any, depth: int = _DEPTH) -> bool:
    """Return whether a progress bar or the like goes through the batches of a step: it runs, or holds what does."""
    if isinstance(one, GeneratorType):
        if one.gi_running or one.gi_code.co_filename.startswith(_OURS):
            return True
    elif not isinstance(one, _AROUND) and not is_watched(one):
        return False
    return depth > 0 and any(leads_to_batches(part, depth - 1) for part in _parts(one))


def _parts(one: Any) -> list[Any]:
    """Return what an iterator goes through."""
    if isinstance(one, GeneratorType):
        return [] if one.gi_running else gc.get_referents(one)
    if isinstance(one, _AROUND):
        held = gc.get_referents(one)
        return [*held, *(part for parts in held if type(parts) is tuple for part in parts[:_DEPTH])]
    return list(attributes_of(one).values()) if is_own(type(one)) else []


def place_of(one: Any) -> object:
    """Return how far an iterator has come: equal for one that has stayed where it was."""
    if isinstance(one, GeneratorType):
        return _place_of_generator(one)
    if type(one) in _SHOWING:
        return operator.length_hint(one)
    if is_iterator(one):
        return None  # which is seen where it is advanced
    return {key: value for key, value in attributes_of(one).items() if type(value) in _PLAIN}


def _place_of_generator(one: GeneratorType[Any, Any, Any]) -> object:
    frame = one.gi_frame
    if frame is None:
        return "at its end"
    if inspect.getgeneratorstate(one) == inspect.GEN_CREATED:
        return NEW
    held = frame.f_locals
    live = live_names(one.gi_code, frame.f_lasti)
    values = [(name, _Same(held[name])) for name in sorted(live) if name in held]
    taken = receiver(one.gi_code, frame.f_lasti)
    receives = taken == "" or (taken is not None and held.get(taken) is not None)
    if isinstance(held, dict):
        held.clear()  # a copy that the frame would keep
    return RECEIVES if receives else (frame.f_lasti, values)


class _Same:
    """Equal to the same object, or to an equal plain one."""

    __slots__ = ("value",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Same):
            return False
        mine, others = self.value, other.value
        if mine is others:
            return True
        return type(mine) is type(others) and type(mine) in _PLAIN and repr(mine) == repr(others)
