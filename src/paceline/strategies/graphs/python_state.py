"""What Python holds that a loss may read: a captured step keeps the values it was captured with.

Compared before every replay are the attributes of modules, of the task and of other objects of the user's, the contents of
lists, dicts and sets, what functions close over, the globals that their code names, hooks on parameters, and where generators
and iterators stand: what `reached_from` leads to. An object that is still the same one is equal, so a comparison takes a few
microseconds for a small model.
"""

from __future__ import annotations

import itertools
import types
from collections import deque
from collections.abc import Iterator
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.compat.modules import HOOK_TABLES, MEMBERS
from paceline.compat.tensors import hooks_of, write_count
from paceline.strategies.base import LossFunction
from paceline.strategies.guards.generator_states import state_of
from paceline.strategies.guards.reached import (
    CLOSED,
    ITERATORS,
    Reached,
    attributes_of,
    is_own,
    is_users,
    place_of,
    reached_from,
    users_code,
)
from paceline.task import Task

_ATOMS = (int, float, complex, bool, str, bytes, type(None))
_LONG = 4096
"""Of a container with more items than these the length alone is compared."""
_COUNTED_ELSEWHERE = "_steps_done"
"""What the run itself sets in a task in every step; whether a loss reads it is seen in its code."""
_WITHOUT = (Tensor, type, types.FunctionType, types.MethodType, types.ModuleType, *CLOSED)
"""What has a dict that is not compared."""
_TELLING = (*ITERATORS, itertools.count)
"""Iterators of which can be said where they stand."""


class PythonState:
    """The values that Python holds now, to be compared with those of later steps."""

    def __init__(self, model: nn.Module, loss: LossFunction) -> None:
        self._parameters = list(model.parameters())
        hooks = [("a hook on a parameter", held) for one in self._parameters if (held := hooks_of(one))]
        found = reached_from(model, [("loss", loss), *hooks], keeps=True)
        _check(found)
        self._generators = [one for one in found.generators.values() if not _is_on_gpu(one)]
        self._iterators = [one for _, one in found.visited if isinstance(one, _TELLING)]
        self.reads_steps = found.reads_steps
        """Whether code reads `task.steps_done`, which is another number in every step."""
        self._names: list[str] = []
        self._tables: list[Any] = []
        self._copies: list[Any] = []
        self._long: list[Any] = []
        self._empty: list[Any] = []
        self._tasks: list[dict[str, Any]] = []
        self._slotted: list[Any] = []
        self._classes: set[type] = set()
        self._cells: list[types.CellType] = []
        self._tensors: list[tuple[Any, Any, Tensor]] = []
        self._host: list[Tensor] = []
        self._arrays: list[np.ndarray[Any, Any]] = []
        named: _Named = {}
        for name, one in found.visited:
            if isinstance(one, Task):
                self._tasks.append(vars(one))
            else:
                for table in _tables_of(one):
                    self._take(name, table)
                if is_own(type(one)) and any("__slots__" in vars(kind) for kind in type(one).__mro__[:-1]):
                    self._slotted.append(one)
            self._classes.update(kind for kind in type(one).__mro__ if is_own(kind))
            if isinstance(one, types.FunctionType):
                self._cells += one.__closure__ or ()
                _note_globals(named, one.__globals__, users_code(one))
            elif isinstance(one, Tensor) and one.device.type == "cpu" and not one.is_inference():
                self._host.append(one)
            elif isinstance(one, np.ndarray) and one.nbytes <= _LONG:
                self._arrays.append(one)
        self._cells = list({id(cell): cell for cell in self._cells}.values())
        self._globals = [(table, sorted(names)) for table, names in named.values() if names]
        self._getters = [(itemgetter(*names), table) for table, names in self._globals]
        self._tensors += [
            (table, key, table[key])
            for table, names in self._globals
            for key in names
            if isinstance(table[key], Tensor)
        ]
        self._values = self._others()

    def _take(self, name: str, table: Any) -> None:
        items: Any = () if isinstance(table, set) else enumerate(table)
        if isinstance(table, dict):
            items = table.items()
        if not table or len(table) > _LONG:
            (self._long if table else self._empty).append(table)
            return
        self._tensors += [(table, key, held) for key, held in items if isinstance(held, Tensor)]
        self._names.append(name)
        self._tables.append(table)
        self._copies.append(table.copy())

    def is_unchanged(self) -> bool:
        """Return whether a loss would read the same values as when this was made."""
        try:
            return (
                all(_held(table, key) is one for table, key, one in self._tensors)
                and not any(self._empty)
                and self._tables == self._copies
                and self._others() == self._values
            )
        except Exception:  # noqa: BLE001 - whatever comparing two objects of the user's raises: they are not the same
            return False

    def changed(self) -> str:
        """Return where something has changed, as far as that can be said."""
        for name, table, copy in zip(self._names, self._tables, self._copies, strict=True):
            try:
                same = table == copy
            except Exception:  # noqa: BLE001
                same = False
            if not same:
                keys = [key for key in table if key not in copy] if isinstance(table, dict) else []
                keys += (
                    [key for key, was in copy.items() if table.get(key) is not was]
                    if isinstance(copy, dict)
                    else []
                )
                return ".".join(str(part) for part in (name or "the model", *keys[:1]))
        return "what the loss reads"

    def _others(self) -> list[Any]:
        """Return what is compared by its value."""
        return [
            [len(table) for table in self._long],
            [
                {key: value for key, value in table.items() if key != _COUNTED_ELSEWHERE}
                for table in self._tasks
            ],
            [_identity(_contents(cell)) for cell in self._cells],
            [get(table) for get, table in self._getters],
            [dict(vars(kind)) for kind in self._classes],
            [write_count(one) for one in self._host],
            [one.tobytes() for one in self._arrays],
            [attributes_of(one) for one in self._slotted],
            [state_of(one) for one in self._generators],
            [place_of(one) for one in self._iterators],
            list(map(hooks_of, self._parameters)),  # a dict of them is compared as others are
        ]


_Named = dict[int, tuple[dict[str, Any], set[str]]]


def _note_globals(
    named: _Named, table: dict[str, Any], names: set[str], inside: tuple[int, ...] = ()
) -> None:
    """Note which globals code names, and what it names of modules of the user's among them."""
    here = names & table.keys()
    named.setdefault(id(table), (table, set()))[1].update(here)
    for value in (table[key] for key in here):
        if isinstance(value, types.ModuleType) and is_users(value.__name__) and id(value) not in inside:
            _note_globals(named, vars(value), names, (*inside, id(value)))


def _check(found: Reached) -> None:
    """Raise where something cannot be compared."""
    if not found.whole:
        raise ValueError("there are too many objects")
    for name, one in found.visited:
        is_iterator = type(one).__module__ in ("builtins", "itertools") and isinstance(one, Iterator)
        ended = isinstance(one, types.GeneratorType) and one.gi_frame is None
        if is_iterator and not ended and not isinstance(one, _TELLING):
            raise ValueError(f"{name} does not tell where it stands")


def _is_on_gpu(generator: Any) -> bool:
    return isinstance(generator, torch.Generator) and generator.device.type != "cpu"


def _tables_of(one: Any) -> Iterator[Any]:
    """Yield the dicts and lists in which an object keeps what code may read."""
    if isinstance(one, nn.Module):
        held = vars(one)
        yield held
        yield from (held[table] for table in (*MEMBERS, *HOOK_TABLES) if table in held)
        # A module's settings may lie in an object of a package, whose insides are not walked through: config.dropout.
        for value in held.values():
            if hasattr(value, "__dict__") and not isinstance(value, (nn.Module, *_WITHOUT)):
                yield vars(value)
    elif isinstance(one, dict | list | deque | set):
        yield one
    elif hasattr(one, "__dict__") and not isinstance(one, _WITHOUT):
        yield vars(one)


def _held(table: Any, key: Any) -> Any:
    return table.get(key) if isinstance(table, dict) else table[key]


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _identity(value: Any) -> Any:
    """Return what stands for a value where equal numbers are the same and of anything else only the same object is."""
    return value if type(value) in _ATOMS else id(value)
