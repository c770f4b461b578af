"""Copies of a model that share with it every object that is not a part of it: settings, a task, a lock.

`copy.deepcopy` takes along everything a module refers to, and a copy never learns what becomes of the original. Here a copy has
modules, parameters and buffers of its own; an object that leads to none of them is the very same. Plain attributes of a module
(`model.mode = "warm"`) are handed to the copy before a step, and what its passes make of them goes back after it.
"""

from __future__ import annotations

import copy
import gc
import logging
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, repeat
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from paceline.compat.modules import HOOKS, children_of

TABLES = frozenset(vars(nn.Module())) - {"training"}
"""What torch itself keeps in a module."""
_ATOMS = (type(None), int, float, complex, bool, str, bytes, type, range, slice, weakref.ref)
_LEAVES = (
    Tensor,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.ModuleType,
    types.CodeType,
    types.FrameType,
    logging.Logger,
)
_ABSENT: Any = object()
_LONGEST = 1000
"""Longer lists and dicts, vocabularies say, are not compared by what they hold."""


class ModelCopy:
    """A model's modules once more; `tensors` are those that take the place of the original's, by the address of the latter."""

    def __init__(self, original: nn.Module, tensors: Mapping[int, Any] | None = None) -> None:
        self._own = {id(one): one for one in _parts(original)}
        shared, copied = outside_and_inside(original, self._own)
        memo = {**{id(one): one for one in shared}, **(tensors or {})}
        self.model: nn.Module = copy.deepcopy(original, memo)
        self._copies = {address: memo[address] for address in self._own if address in memo}
        self._originals = {id(memo[address]): self._own[address] for address in self._copies}
        self._structure = structure(original)
        self.original = original
        """What it is a copy of."""
        pairs = [*zip(original.modules(), self.model.modules(), strict=True)]
        # What leads to the model's parts has to be copied with them, a config that knows its model say: kept the same likewise.
        pairs += [(one, memo[id(one)]) for one in copied if memo.get(id(one), one) is not one]
        places = [(_place(one), _place(other)) for one, other in pairs]
        self._pairs = [pair for pair in places if isinstance(pair[0], dict)]
        self._contents = [
            (one, gc.get_referents(one)) for one, _ in pairs if not isinstance(_place(one), dict)
        ]
        """Lists, sets and whatever else leads to modules, with what it held when it was copied: a copy's stays like that."""
        self._given: list[dict[str, tuple[Any, Any]]] = []
        self.note()

    def note(self) -> None:
        """Take what original and copy have now for the same: a copy may be given a forward of its own."""
        self._given = [
            {
                key: (one.get(key, _ABSENT), other.get(key, _ABSENT))
                for key in {**one, **other}
                if key not in TABLES
            }
            for one, other in self._pairs
        ]

    def changed(self) -> str | None:
        """Return the name of a module that has got other members or hooks, or of an attribute that leads to other modules."""
        now = structure(self.original)
        if now.keys() != self._structure.keys():
            return next(iter(now.keys() ^ self._structure.keys()))
        for name, held in now.items():
            if len(held) != len(self._structure[name]) or not all(map(is_, held, self._structure[name])):
                return name
        for name, (held, _), given in zip(chain(now, repeat("")), self._pairs, self._given, strict=False):
            for key, value in held.items():
                if (
                    key not in TABLES
                    and given.get(key, (_ABSENT,))[0] is not value
                    and self._leads_inside(value)
                ):
                    return f"{name}.{key}".lstrip(".")
        for one, contents in self._contents:
            now_held = gc.get_referents(one)
            if len(now_held) != len(contents) or not all(map(is_, now_held, contents)):
                return self._name_of(one)
        return None

    def _name_of(self, one: Any) -> str:
        """Return the attribute that holds an object, or leads to it."""
        for name, module in self.original.named_modules():
            for key, value in vars(module).items():
                if key not in TABLES and any(found is one for found in _reached([value], self._own)):
                    return f"{name}.{key}".lstrip(".")
        return f"a {type(one).__name__} of the model"

    def give(self) -> None:
        """Set the copy's plain attributes to those of the original."""
        for (held, copied), given in zip(self._pairs, self._given, strict=True):
            for key, value in held.items():
                if key in TABLES:
                    continue
                known = given.get(key)
                if known is None or known[0] is not value:
                    known = given[key] = value, self._copies.get(id(value), value)
                if known[1] is not _ABSENT and copied.get(key, _ABSENT) is not known[1]:
                    copied[key] = known[1]
            for key in [key for key in copied if key not in TABLES and key not in given]:
                del copied[key]  # of a pass whose step was not taken
            for key in [key for key, known in given.items() if known[0] is not _ABSENT and key not in held]:
                del given[key]
                copied.pop(key, None)

    def take(self) -> None:
        """Set the original's plain attributes to what passes of the copy have made of them."""
        for (held, copied), given in zip(self._pairs, self._given, strict=True):
            for key, value in copied.items():
                if key in TABLES or given.get(key, (None, _ABSENT))[1] is value:
                    continue
                back = self._originals.get(id(value), value)
                if back is value and self._leads_inside(value, self._originals):
                    back = held.get(key, _ABSENT)  # made of the copy's own modules: it stays with them
                elif isinstance(value, Tensor) and value.device not in (torch.device("cpu"), self._home()):
                    back = held.get(key, _ABSENT)
                else:
                    held[key] = back
                given[key] = back, value

    def give_one(self, module: nn.Module, key: str) -> None:
        """Set one attribute of the copy to that of the original, or delete it where that has none."""
        for (held, copied), given in zip(self._pairs, self._given, strict=True):
            if held is vars(module):
                value = held.get(key, _ABSENT)
                given[key] = value, self._copies.get(id(value), value)
                copied.pop(key, None)
                if value is not _ABSENT:
                    copied[key] = given[key][1]

    def keep_apart(self, kind: type) -> None:
        """Never hand the copy what the original has now of this kind; the copy goes on with what it has."""
        for (held, copied), given in zip(self._pairs, self._given, strict=True):
            for key, value in held.items():
                if isinstance(value, kind):
                    given[key] = value, copied.get(key, _ABSENT)

    def _home(self) -> Any:
        """Return the device of the original; of what lies on another one it keeps what it had."""
        return next((one.device for one in self.original.parameters()), None)

    def _leads_inside(self, value: Any, parts: Mapping[int, Any] | None = None) -> bool:
        parts = self._own if parts is None else parts
        if type(value) in _ATOMS or id(value) in parts:
            return False
        return any(id(child) in parts for one in _reached([value], parts) for child in _children(one))


class Attributes:
    """The plain attributes of some modules, compared between two moments."""

    def __init__(self, named: Iterable[tuple[str, nn.Module]]) -> None:
        self._tables = {name: vars(module) for name, module in named}
        self._before: list[dict[str, Any]] = []
        self._containers = [
            (f"{name}.{key}".lstrip("."), value)
            for name, table in self._tables.items()
            for key, value in table.items()
            if key not in TABLES and isinstance(value, list | dict | set | deque) and len(value) <= _LONGEST
        ]
        self._contents: list[list[Any]] = []

    def begin(self) -> None:
        """Note what they are now."""
        self._before = [table.copy() for table in self._tables.values()]
        self._contents = [_content(one) for _, one in self._containers]

    def written(self) -> list[str]:
        """Return the names of those that are something else than when it began, or hold something else."""
        found = [
            f"{name}.{key}".lstrip(".")
            for (name, table), before in zip(self._tables.items(), self._before, strict=True)
            for key in {**before, **table}
            if key not in TABLES
            and key != "training"
            and (key not in table or key not in before or not _equal(table[key], before[key]))
        ]
        for (name, one), content in zip(self._containers, self._contents, strict=True):
            now = _content(one)
            if len(now) != len(content) or not all(map(_equal, now, content)):
                found.append(name)
        self._before, self._contents = [], []
        return found


def _content(one: Any) -> list[Any]:
    return [*one, *one.values()] if isinstance(one, dict) else list(one)


def structure(model: nn.Module) -> dict[str, list[Any]]:
    """Return the members and hooks of each module."""
    return {
        name: [
            *children_of(module).values(),
            *(hook for table in HOOKS if vars(module)[table] for hook in vars(module)[table].values()),
        ]
        for name, module in model.named_modules()
    }


def outside_and_inside(model: nn.Module, own: Mapping[int, Any]) -> tuple[list[Any], list[Any]]:
    """Return the objects that modules refer to: those that reach no part of the model, and those that do."""
    roots: list[Any] = []
    for module in model.modules():
        roots += [value for key, value in vars(module).items() if key not in TABLES]
        roots += [hook for table in HOOKS for hook in vars(module)[table].values()]
    found = list(_reached(roots, own))
    holders: dict[int, list[Any]] = {}
    inside: list[Any] = []
    for one in found:
        children = _children(one)
        if any(id(child) in own for child in children):
            inside.append(one)
        for child in children:
            holders.setdefault(id(child), []).append(one)
    leads = {id(one) for one in inside}
    while inside:
        for holder in holders.get(id(inside.pop()), ()):
            if id(holder) not in leads:
                leads.add(id(holder))
                inside.append(holder)
    return [one for one in found if id(one) not in leads], [one for one in found if id(one) in leads]


def _place(one: Any) -> Any:
    """Return the dict, list or set in which an object keeps what it holds."""
    if isinstance(one, dict | list | set):
        return one
    return getattr(one, "__dict__", None) if not isinstance(one, _LEAVES) else None


def _equal(one: Any, other: Any) -> bool:
    """Return whether two values are one object, or plain values that are alike."""
    return one is other or (type(one) is type(other) and type(one) in _ATOMS and one == other)


def _parts(model: nn.Module) -> Iterator[Any]:
    yield from model.modules()
    yield from model.parameters()
    yield from model.buffers()


def _reached(roots: Iterable[Any], own: Mapping[int, Any]) -> Iterator[Any]:
    """Yield everything that is no part of the model and is reached without passing through one."""
    seen: set[int] = set()
    waiting = list(roots)
    while waiting:
        one = waiting.pop()
        if id(one) in own or id(one) in seen or type(one) in _ATOMS or isinstance(one, type):
            continue
        seen.add(id(one))
        yield one
        waiting += _children(one)


def _children(one: Any) -> list[Any]:
    """Return what an object holds; functions are shared by every copy, whatever they close over."""
    if isinstance(one, _LEAVES):
        return []
    return [
        child for child in gc.get_referents(one) if type(child) not in _ATOMS and not isinstance(child, type)
    ]
