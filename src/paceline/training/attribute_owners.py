"""Whose attributes count as a run's, modules and task by name, and what each holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from paceline.compat.modules import HOOKS as HOOK_TABLES
from paceline.strategies.guards.reached import attributes_of, is_users
from paceline.task import Task
from paceline.training.attribute_refusals import HOOKS, KIND, Key
from paceline.training.attribute_values import copied, described, module_of, opened, same
from paceline.training.held_objects import HELD, held_owners
from paceline.training.saved_attributes import ABSENT

TASK = "the task"
_TABLES = (dict, list, set, deque, np.ndarray, torch.Tensor)
"""What is filled anew, and stays the object that it is."""
MADE = (KIND, HOOKS)
"""What is compared beside attributes, and is never set."""


def owners_of(model: nn.Module, task: Task | None) -> dict[str, Any]:
    """Return everything whose attributes count, by name."""
    owners: dict[str, Any] = {name or "the model": module for name, module in model.named_modules()}
    if task is not None:
        owners[TASK] = task
    return owners | held_owners(owners)


Read = tuple[dict[Key, Any], dict[Key, Any]]
"""Copies of the attributes that count, and what the others hold."""


def read_all(owners: Mapping[str, Any]) -> Read:
    """Return every attribute that counts, with the class of each module, and what all other attributes hold."""
    found, others = dict[Key, Any](), dict[Key, Any]()
    for name, owner in owners.items():
        if isinstance(owner, nn.Module) and not isinstance(owner, LazyModuleMixin) and HELD not in name:
            found[name, KIND], found[name, HOOKS] = _kind(owner), _hooks(owner)
        for attribute, value in attributes_held(owner).items():
            if attribute[0] == "_":
                continue
            if (copy := copied(value)) is None:
                others[name, attribute] = value
            else:
                found[name, attribute] = copy[0]
    return found, others


def read_one(owners: Mapping[str, Any], name: str, attribute: str) -> Any:
    """Return a copy of what an attribute holds, alone in a tuple; what is not compared as it is."""
    if name not in owners or attribute in MADE:
        return (value_of(owners, name, attribute),)
    value = attributes_held(owners[name]).get(attribute, ABSENT)
    copy = (ABSENT,) if value is ABSENT else copied(value)
    return value if copy is None else copy


def attributes_held(owner: Any) -> dict[str, Any]:
    """Return the attributes of an owner by name, the table itself where it has one."""
    return vars(owner) if hasattr(owner, "__dict__") else attributes_of(owner)


def _kind(owner: object) -> str:
    return f"{type(owner).__module__}.{type(owner).__qualname__}"


def _hooks(owner: nn.Module) -> list[str]:
    """Return the hooks on a module that a user has put there, with the table of each.

    A library puts its own there again where it needs them, as transformers does in a first pass.
    """
    found = [
        f"{table.strip('_')[:-1]} {described(hook)}"
        for table in HOOK_TABLES
        for hook in vars(owner).get(table, {}).values()
        if is_users(module_of(hook))
    ]
    return sorted(found)


def value_of(owners: Mapping[str, Any], name: str, attribute: str) -> Any:
    """Return a copy of what an attribute holds, or ABSENT: also for what is not compared."""
    if name not in owners:
        return ABSENT
    if attribute in MADE:
        return _kind(owners[name]) if attribute == KIND else _hooks(owners[name])
    copy = copied(attributes_held(owners[name]).get(attribute, ABSENT))
    return ABSENT if copy is None else copy[0]  # of others nothing is compared


def tables_of(owners: Mapping[str, Any]) -> dict[Key, Any]:
    """Return the tables themselves that attributes hold, others than copies."""
    return {
        (name, attribute): value
        for name, owner in owners.items()
        for attribute, value in attributes_held(owner).items()
        if attribute[0] != "_" and isinstance(value, _TABLES)
    }


def put(owner: Any, attribute: str, copy: Any, table: Any) -> None:
    """Give an attribute the value of a copy, or take it away; the `table` that others may hold too holds it then."""
    if copy == ABSENT:
        if attribute in attributes_held(owner):
            object.__delattr__(owner, attribute)
        return
    _set(owner, attribute, refilled(table, opened(copy), {}))


def _set(owner: Any, attribute: str, value: Any) -> None:
    try:
        setattr(owner, attribute, value)
    except Exception:  # noqa: BLE001  (a frozen dataclass, or a setter that compares with what is not set yet)
        if hasattr(owner, "__dict__"):
            vars(owner)[attribute] = value
        else:
            object.__setattr__(owner, attribute, value)


def set_changes(owners: Mapping[str, Any], changes: Mapping[Key, tuple[Any, Any]]) -> None:
    """Change what is as it was where the changes began."""
    for (name, attribute), (was, now) in changes.items():
        if attribute not in MADE and name in owners and same(value_of(owners, name, attribute), was):
            put(owners[name], attribute, now, attributes_held(owners[name]).get(attribute))


def refilled(there: Any, value: Any, seen: dict[int, Any]) -> Any:
    """Return a value in the table that is there, and what it holds in those in it: others may hold them too.

    What is there at two places at once, and is to hold two different things, is one of them no more.
    """
    if type(there) is not type(value) or not isinstance(value, _TABLES) or there is value:
        return value
    if seen.setdefault(id(there), value) is not value and not same(copied(seen[id(there)]), copied(value)):
        return value
    if isinstance(value, list | deque):
        members = [refilled(old, new, seen) for old, new in zip_longest(there, value)][: len(value)]
        there.clear()
        there.extend(members)
    elif isinstance(value, dict):
        items = {name: refilled(there.get(name), one, seen) for name, one in value.items()}
        there.clear()
        there.update(items)
    elif isinstance(value, set):
        there.clear()
        there.update(value)
    elif there.shape != value.shape or there.dtype != value.dtype:
        return value
    else:
        try:
            there[...] = value
        except (
            RuntimeError,
            ValueError,
        ):  # it may not be written to: an array that is locked, a tensor of inference mode
            return value
    return there
