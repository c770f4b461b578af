"""Whose attributes count as a run's, modules and task by name, and what each holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from paceline.compat.modules import HOOKS as HOOK_TABLES
from paceline.task import Task
from paceline.training.attribute_refusals import HOOKS, KIND, Key
from paceline.training.attribute_values import copied, described
from paceline.training.saved_attributes import ABSENT

TASK = "the task"
MADE = (KIND, HOOKS)
"""What is compared beside attributes, and is never set."""


def owners_of(model: nn.Module, task: Task | None) -> dict[str, Any]:
    """Return everything whose attributes count, by name."""
    owners: dict[str, Any] = {name or "the model": module for name, module in model.named_modules()}
    return owners if task is None else {**owners, TASK: task}


def read_all(model: nn.Module, task: Task | None) -> tuple[dict[Key, Any], frozenset[Key]]:
    """Return every attribute that counts, with the class of each module, and which attributes hold something else."""
    found, others = dict[Key, Any](), set[Key]()
    for name, owner in owners_of(model, task).items():
        if isinstance(owner, nn.Module) and not isinstance(owner, LazyModuleMixin):
            found[name, KIND], found[name, HOOKS] = _kind(owner), _hooks(owner)
        for attribute, value in vars(owner).items():
            if attribute[0] == "_":
                continue
            if (copy := copied(value)) is None:
                others.add((name, attribute))
            else:
                found[name, attribute] = copy[0]
    return found, frozenset(others)


def _kind(owner: object) -> str:
    return f"{type(owner).__module__}.{type(owner).__qualname__}"


def _hooks(owner: nn.Module) -> list[str]:
    """Return the hooks on a module that a user has put there, with the table of each."""
    found = [
        f"{table.strip('_')[:-1]} {said}"
        for table in HOOK_TABLES
        for hook in vars(owner).get(table, {}).values()
        if not (said := described(hook)).startswith(("paceline.", "torch."))
    ]
    return sorted(found)


def value_of(owners: Mapping[str, Any], name: str, attribute: str) -> Any:
    """Return a copy of what an attribute holds, the name of its class for what is not compared, or ABSENT."""
    if name not in owners:
        return ABSENT
    if attribute in MADE:
        return _kind(owners[name]) if attribute == KIND else _hooks(owners[name])
    value = vars(owners[name]).get(attribute, ABSENT)
    if value is ABSENT:
        return value
    copy = copied(value)
    return _kind(value) if copy is None else copy[0]  # of others nothing is compared


def put(owner: Any, attribute: str, value: Any) -> None:
    """Give an attribute a value; a table stays the one that others may hold too."""
    there = vars(owner).get(attribute)
    if type(there) is not type(value) or not isinstance(value, dict | list | set):
        setattr(owner, attribute, value)
    elif isinstance(there, list):
        there[:] = value
    else:
        there.clear()
        there.update(value)
