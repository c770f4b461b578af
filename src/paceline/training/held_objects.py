"""Objects that a task and its modules hold and a run changes: their attributes count too."""

from __future__ import annotations

import argparse
import datetime as dt
import io
import logging
import time
import types
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import nn

from paceline.strategies.guards.reached import CLOSED, attributes_of, is_own

HELD = " of "
"""What the name of such an object has, and that of a module has not."""
_MOST, _ITEMS, _LEVELS = 500, 64, 2
"""How many objects count, how many items of a table are looked at, and how many objects may lie one in the other."""
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


def is_log(value: Any) -> bool:
    """Return whether it is what is written to, or read from, for people: a file, a logger, a time."""
    if isinstance(value, io.IOBase | logging.Logger | logging.Handler | dt.date):
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
