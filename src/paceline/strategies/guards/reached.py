"""Finds what passes may compute with beside parameters and buffers: generators, tensors, arrays and numbers that code leads to.

Reached are attributes of modules, tasks and plain objects, the contents of lists and dicts, what functions close over, and
the globals that their code names. Nothing is called and no property is read. Data sets are left out, and so are objects and
functions of Python and of installed packages, unless they are modules of a model or mappings. Of a long list the first items
are looked at, and of everything `LIMIT` objects.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
import random
import sys
import types
from argparse import Namespace
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, Sampler

from paceline.compat.code_names import names_in
from paceline.compat.libraries import is_library
from paceline.compat.modules import HOOKS, buffers_of, children_of

Generator = (
    torch.Generator | np.random.Generator | np.random.RandomState | np.random.BitGenerator | random.Random
)
Array = np.ndarray[Any, Any]
Named = tuple[str, Any]

LOOP = "the loop's "
"""How the names of what a loop has begin."""
LIMIT = 20_000
"""How many objects are looked at: some 50 ms on one core."""
_DEPTH = 6
"""How many objects that are no modules may lie on the way."""
_ITEMS = 256
_FRAMES = 3
_ATOMS = (int, float, complex, bool, str, bytes, type(None))
_NUMBERS = (int, float)
ITERATORS: tuple[type, ...] = (
    type(iter(range(0))),
    type(iter(range(1 << 99))),
    type(iter([])),
    type(iter(())),
)
"""Iterators of which can be said, without taking an item, how far they have come."""
_TABLES = frozenset(vars(nn.Module()))
CLOSED = (Dataset, DataLoader, Sampler, Optimizer)
"""What is not looked into: passes do not compute with it."""
_OTHERS = frozenset({"torch", "numpy", "paceline"})
"""Packages whose classes and functions hold nothing of the user's, wherever they lie."""


@dataclass(slots=True)
class Reached:
    """What was found, by where it lies."""

    generators: dict[str, Generator] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    """Those of modules that are not the model's: a teacher's, say."""
    arrays: dict[str, Array] = field(default_factory=dict)
    numbers: dict[str, object] = field(default_factory=dict)
    """Those of Python and numpy, lengths of lists of them, and how far iterators have come."""
    reads_steps: bool = False
    """Whether code among it reads `task.steps_done`."""
    visited: list[Named] = field(default_factory=list)
    """Everything that was looked at, where that was asked for."""
    whole: bool = True
    """Whether all was looked at, and not `LIMIT` objects of more."""


def reached_from(model: nn.Module, others: Iterable[Named] = (), *, keeps: bool = False) -> Reached:
    """Return what is reached from a model and from other objects, each given with its name; `keeps` everything on the way."""
    found = Reached()
    seen: dict[int, Any] = {id(one): one for one in (*model.parameters(), *model.buffers(), *_streams())}
    own = set(map(id, model.modules()))
    waiting: deque[tuple[str, Any, int]] = deque((name, one, 0) for name, one in [("", model), *others])
    left = LIMIT
    while waiting and left:
        name, one, depth = waiting.popleft()
        if type(one) in _ATOMS or id(one) in seen:
            continue
        seen[id(one)] = one
        left -= 1
        if keeps:
            found.visited.append((name, one))
        if isinstance(one, Generator):
            found.generators[name] = one
        elif isinstance(one, Tensor):
            if not isinstance(one, nn.Parameter):
                found.tensors[name] = one
        elif isinstance(one, np.ndarray):
            found.arrays[name] = one
        elif isinstance(one, (*ITERATORS, itertools.count)):
            found.numbers.setdefault(name, place_of(one))
        elif depth < _DEPTH:
            if isinstance(one, nn.Module) and id(one) not in own:
                held_by = buffers_of(one).items()
                found.buffers |= {f"{name}.{key}": buffer for key, buffer in held_by if buffer is not None}
            deeper = depth + (not isinstance(one, nn.Module))
            waiting.extend((key, held, deeper) for key, held in _noted(found, name, one))
    found.whole = not waiting
    return found


def _noted(found: Reached, name: str, one: Any) -> Iterator[Named]:
    """Note the numbers that an object holds, and yield what else it does."""
    found.reads_steps |= isinstance(one, types.FunctionType) and "steps_done" in one.__code__.co_names
    # Numbers of torch's modules are settings, and some of those are made in a first pass.
    counted = not isinstance(one, nn.Module) or not type(one).__module__.startswith("torch.")
    for key, held in _held(name, one):
        if type(held) in _NUMBERS or isinstance(held, np.number):
            if counted:
                found.numbers.setdefault(key, held)  # an object's own before its class's
            if isinstance(one, list | deque):
                found.numbers[f"len({name})"] = len(one)
        elif type(held) not in _ATOMS:
            yield key, held


def loop_objects(frame: types.FrameType | None) -> list[Named]:
    """Return the variables of a loop, and of the functions that called it, and the globals that their code names."""
    found: list[Named] = []
    for _ in range(_FRAMES):
        while frame is not None and _is_in_library(frame.f_code.co_filename):
            frame = frame.f_back  # a progress bar around the batches
        if frame is None or not is_users(frame.f_globals.get("__name__", "")):
            break
        own = frame.f_locals
        named = [*own.items(), *_named_globals(frame.f_code, frame.f_globals)]
        found += [(LOOP + name, value) for name, value in named if not name.startswith("__")]
        if frame.f_code.co_flags & inspect.CO_OPTIMIZED and isinstance(own, dict):
            own.clear()  # a copy that the frame would keep, and losses with their graphs in it
        frame = frame.f_back
    return found


def _streams() -> list[Any]:
    """Return the generators that every shard seeds."""
    cuda = list(torch.cuda.default_generators) if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    own = [getattr(function, "__self__", None) for function in (random.random, np.random.random)]
    return [torch.default_generator, *cuda, *own]


def _held(name: str, one: Any) -> Iterator[Named]:
    """Yield what an object holds."""
    if isinstance(one, CLOSED):
        return
    if isinstance(one, nn.Module):
        yield from _of_module(name, one)
    elif isinstance(one, Mapping):
        yield from ((f"{name}[{_word(key)}]", value) for key, value in islice(_items(one), _ITEMS))
    elif isinstance(one, list | tuple | deque | set | frozenset):
        yield from ((f"{name}[{index}]", value) for index, value in enumerate(islice(one, _ITEMS)))
    elif isinstance(one, types.FunctionType):
        yield from _of_function(name, one)
    elif isinstance(one, types.MethodType):
        yield from ((name, one.__self__), (name, one.__func__))
    elif isinstance(one, functools.partial):
        yield from ((name, one.func), (name, one.args), (name, one.keywords))
    elif isinstance(one, staticmethod | classmethod):
        yield name, one.__func__
    elif isinstance(one, property | functools.cached_property):
        yield name, one.fget if isinstance(one, property) else one.func
    elif isinstance(one, type):
        yield from _of_class(name, one)
    elif isinstance(one, types.SimpleNamespace | Namespace) or is_own(type(one)):
        yield from _of_object(name, one)


def place_of(one: Any) -> object:
    """Return how far an iterator has come."""
    return repr(one) if isinstance(one, itertools.count) else operator.length_hint(one)


def _items(one: Mapping[Any, Any]) -> Iterable[Named]:
    """Return the items of a dict; those of another mapping, which may compute them, are not asked for."""
    return one.items() if isinstance(one, dict | types.MappingProxyType) else attributes_of(one).items()


def _word(key: Any) -> str:
    return repr(key)[:40] if type(key) in (str, int) else type(key).__name__


def attributes_of(one: Any) -> dict[str, Any]:
    """Return the attributes of an object, those in slots included."""
    held = dict(getattr(one, "__dict__", {}))
    for kind in type(one).__mro__:
        slots = vars(kind).get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            member = vars(kind).get(slot)
            if isinstance(member, types.MemberDescriptorType) and hasattr(one, slot):
                held[slot] = getattr(one, slot)
    return held


def _of_module(name: str, module: nn.Module) -> Iterator[Named]:
    prefix = f"{name}." if name else ""
    held = vars(module)
    yield from ((prefix + key, value) for key, value in held.items() if key not in _TABLES)
    for table in HOOKS:
        yield from ((f"{prefix}{_name_of(hook)}", hook) for hook in held[table].values())
    yield from ((prefix + key, child) for key, child in children_of(module).items())
    yield from _of_class(name, type(module))


def _name_of(hook: Any) -> str:
    """Return what a hook is called."""
    return getattr(hook, "__name__", type(hook).__name__)


def _of_object(name: str, one: Any) -> Iterator[Named]:
    yield from ((f"{name}.{key}", value) for key, value in islice(attributes_of(one).items(), _ITEMS))
    yield from _of_class(name, type(one))


def _of_class(name: str, kind: type) -> Iterator[Named]:
    """Yield what a class and its bases hold, methods included; under the name of the object whose class it is."""
    prefix = f"{name}." if name else ""
    for one in kind.__mro__:
        if is_own(one):
            yield from (
                (prefix + key, value)
                for key, value in list(vars(one).items())
                if key not in ("__dict__", "__weakref__", "__annotations__")
            )


def _of_function(name: str, function: types.FunctionType) -> Iterator[Named]:
    if not is_users(function.__module__ or ""):
        return
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield variable, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield name, function.__defaults__
    yield name, function.__kwdefaults__
    yield name, vars(function)
    yield from _named_globals(function.__code__, function.__globals__)


def _named_globals(code: types.CodeType, held: dict[str, Any]) -> list[Named]:
    """Return the globals that code names, and what it names of modules of the user's."""
    found: list[Named] = []
    for name in code.co_names:
        value = held.get(name)
        if isinstance(value, types.ModuleType):
            if is_users(value.__name__):
                found += [(f"{name}.{key}", vars(value)[key]) for key in code.co_names if key in vars(value)]
        elif value is not None:
            found.append((name, value))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found += _named_globals(constant, held)
    return found


def users_code(function: types.FunctionType) -> set[str]:
    """Return the names of the globals that a function of the user's reads; none of another's."""
    return names_in(function.__code__) if is_users(function.__module__ or "") else set()


def is_own(kind: type) -> bool:
    """Return whether a class is the user's."""
    return is_users(kind.__module__)


@functools.cache
def is_users(module: str) -> bool:
    """Return whether the module of this name is neither Python's nor installed."""
    root, file = module.partition(".")[0], getattr(sys.modules.get(module), "__file__", None)
    if not isinstance(file, str):  # a prompt's, or one that is part of Python's program
        return root == "__main__" or root not in (_OTHERS | sys.stdlib_module_names)
    return root not in _OTHERS and not _is_in_library(file)


def _is_in_library(file: str) -> bool:
    return is_library(str(Path(file).parent))
