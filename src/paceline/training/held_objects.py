"""Objects that a task and its modules hold and a run changes: their attributes count too, and of others what became of them."""

from __future__ import annotations

import argparse
import datetime as dt
import io
import itertools
import logging
import random
import time
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.strategies.guards.reached import CLOSED, ITERATORS, attributes_of, is_own, place_of
from paceline.training.attribute_refusals import Key

HELD = " of "
"""What the name of such an object has, and that of a module has not."""
_MOST, _ITEMS, _LEVELS = 500, 64, 2
"""How many objects count, how many items of a table are looked at, and how many objects may lie one in the other."""
_LONG = 10_000
"""How many items of a long table are looked at for a change."""
_MOMENT = 600.0
"""For how many seconds a start may prepare."""
_OF_LOGS = ("logging", "mlflow", "rich", "tensorboard", "tqdm", "wandb")


def held_owners(owners: Mapping[str, Any]) -> dict[str, Any]:
    """Return objects of the user's classes that modules and task hold, by name; layers that are not the model's, too."""
    own = {id(one) for one in owners.values()}
    found: dict[str, Any] = {}
    level = dict(owners)
    for _ in range(_LEVELS):
        below = {
            f"{place} of {name}": one
            for name, owner in level.items()
            for place, one in _held(owner)
            if id(one) not in own
        }
        level = dict(islice(below.items(), _MOST - len(found)))
        for name, one in list(level.items()):
            if isinstance(one, nn.Module):
                inside = dict(islice(one.named_modules(), _MOST))
                if any(id(module) in own for module in inside.values()):
                    del level[name]  # it is made of the model, or the model of it
                    continue
                found |= {f"{part} of {name}" if part else name: module for part, module in inside.items()}
            else:
                found[name] = one
    return found


def _held(owner: Any) -> Iterator[tuple[str, Any]]:
    if type(owner).__module__.startswith("torch."):
        return
    for attribute, value in (vars(owner) if isinstance(owner, nn.Module) else attributes_of(owner)).items():
        if attribute[0] == "_":
            continue
        items: Any = ()
        if type(value) is dict:
            items = ((f"{attribute}[{key!r:.40}]", one) for key, one in value.items())
        elif type(value) in (list, tuple):
            items = ((f"{attribute}[{place}]", one) for place, one in enumerate(value))
        yield from (
            (place, one) for place, one in [(attribute, value), *islice(items, _ITEMS)] if _counts(one)
        )


def _counts(one: Any) -> bool:
    if isinstance(one, (type, types.ModuleType, torch.Tensor, *CLOSED)):
        return False
    if isinstance(one, nn.Module | types.SimpleNamespace | argparse.Namespace):
        return True
    return is_own(type(one)) and bool(attributes_of(one))


class StartObjects:
    """What attributes held when the steps began and nobody compares: which of it was replaced or used since."""

    def __init__(self, objects: Mapping[Key, Any]) -> None:
        self._refs = {key: _reference(one) for key, one in objects.items()}
        self._states = {key: state for key, one in objects.items() if (state := _state_of(one)) is not None}
        self._replaced: set[Key] = set()

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
        """Return which generators and iterators have come further, and which tables hold something else."""
        return {
            key
            for key, state in self._states.items()
            if key in objects and objects[key] is self._refs[key]() and _state_of(objects[key]) != state
        }


def is_log(value: Any) -> bool:
    """Return whether it is what is written to, or read from, for people: a file, a logger, a time."""
    if isinstance(value, io.IOBase | logging.Logger | logging.Handler | dt.date | dt.timedelta):
        return True
    owner = getattr(value, "__self__", None)
    if owner is not None and not isinstance(owner, types.ModuleType):
        return is_log(owner)
    module = str(getattr(type(value), "__module__", ""))
    return (
        value is print or module.partition(".")[0] in _OF_LOGS or module.startswith("torch.utils.tensorboard")
    )


def is_from_clock(value: Any) -> bool:
    """Return whether a value was read from a clock a moment ago: a start of its own has a time of its own."""
    clocks = (time.time, time.monotonic, time.perf_counter)
    return type(value) is float and any(0 <= clock() - value < _MOMENT for clock in clocks)


def _reference(one: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(one)
    except TypeError:
        return lambda: one


def _state_of(one: Any) -> Any:
    """Return how far a generator of numbers, or an iterator, has come, and what there is in a table."""
    if isinstance(one, dict | list):  # one that holds other objects too, or is long
        items = islice(one.items() if isinstance(one, dict) else enumerate(one), _LONG)
        return hash((len(one), *(repr(pair) for pair in items if type(pair[1]) in (bool, int, float, str))))
    if isinstance(one, random.Random):
        return hash(one.getstate())
    if isinstance(one, torch.Generator):
        return one.get_state().numpy().tobytes()
    if isinstance(one, np.random.Generator | np.random.RandomState):
        return repr(
            one.bit_generator.state if isinstance(one, np.random.Generator) else one.get_state(legacy=False)
        )
    if isinstance(one, types.GeneratorType):
        return one.gi_frame is None or one.gi_frame.f_lasti
    return place_of(one) if isinstance(one, (*ITERATORS, itertools.count)) else None
