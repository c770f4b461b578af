"""Copies of what plain attributes hold, by which workers compare them and hand them on: numbers, text, tables, functions.

A function or class is known by its name and its code. One that can be found by its name, or that lies in no file, can be handed
to another process; one that was made inside of a function, with values of that, cannot.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from functools import cached_property, lru_cache, partial
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch

from paceline.strategies.guards.reached import is_users
from paceline.training.attribute_holders import made_of, parts_of
from paceline.training.by_value import Payload, pack

_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    Fraction,
    Decimal,
    type(Path()),
)
_TABLES = (tuple, list, dict, set, frozenset)
_MOST, _DEEPEST = 1000, 8
"""How many values a table may hold, tables in it included; a longer one is data."""


@dataclass(frozen=True)
class FunctionCopy:
    """Stands for a function or class."""

    name: str
    digest: str
    """What it does, as far as its code and the plain values in it tell."""
    value: Any = field(repr=False)
    """Itself, in the process that has looked it up; None where a checkpoint names what is not there."""

    @cached_property
    def payload(self) -> Payload | None:
        """As it travels; None where it cannot."""
        return None if self.value is None or isinstance(self.value, MethodType) else _payload(self.value)

    def __getstate__(self) -> dict[str, Any]:
        return {"name": self.name, "digest": self.digest, "payload": self.payload}


@dataclass(frozen=True)
class Unordered:
    """Stands for a set, whose order is another in each process."""

    kind: type
    members: list[Any]


@dataclass(frozen=True)
class Holding:
    """Stands for what holds plain values in a class of its own."""

    kind: str
    parts: tuple[Any, ...]


class _OtherError(Exception):
    """What is copied holds something that is not compared."""


def copied(value: Any) -> tuple[Any] | None:
    """Return a copy of a value, alone in a tuple; None of what is not compared: a tensor, an object, a long table."""
    try:
        return (_copied(value, _DEEPEST, iter(range(_MOST))),)
    except _OtherError:
        return None


def opened(copy: Any) -> Any:
    """Return the value that a copy was made of."""
    if isinstance(copy, FunctionCopy):
        return _looked_up(copy)
    if isinstance(copy, Unordered):
        return copy.kind(map(opened, copy.members))
    if isinstance(copy, tuple | list):
        return type(copy)(map(opened, copy))
    if isinstance(copy, dict):
        return {opened(name): opened(one) for name, one in copy.items()}
    if isinstance(copy, Holding):
        return made_of(copy.kind, [opened(one) for one in copy.parts])
    return copy


def _looked_up(copy: FunctionCopy) -> Any:
    if isinstance(kind := getattr(copy, "value", None), type):
        return kind  # itself, not one that is made again of its code
    if copy.payload is None:
        raise ValueError(f"{copy.name} cannot travel")
    return copy.payload.open()


def held_back(copy: Any) -> FunctionCopy | None:
    """Return the first function in a copy that cannot be handed to another process."""
    if isinstance(copy, FunctionCopy):
        return copy if copy.payload is None else None
    if isinstance(copy, Unordered | Holding):
        copy = copy.members if isinstance(copy, Unordered) else copy.parts
    members = copy.values() if isinstance(copy, dict) else copy if isinstance(copy, tuple | list) else ()
    return next((found for one in members if (found := held_back(one)) is not None), None)


def same(copy: Any, other: Any) -> bool:
    """Return whether two copies are equal: 1 is not True here, and nan is itself."""
    if type(copy) is type(other) and type(copy) in (str, int, bool):
        return bool(copy == other)
    return copy is other or repr(copy) == repr(other)


def shown(copy: Any) -> str:
    """Return a copy as a message names it."""
    if isinstance(copy, FunctionCopy):
        return copy.name
    try:
        return f"{opened(copy)!r:.60}"
    except (LookupError, TypeError, ValueError):
        return f"{copy!r:.60}"


def described(function: Any) -> str:
    """Return the name and the code of whatever is called, for a comparison among workers."""
    function = _called(function)
    return (
        f"{function.__module__}.{function.__qualname__}"
        if isinstance(function, type)
        else " ".join(known(function))
    )


def module_of(function: Any) -> str:
    """Return the name of the module that has the code of whatever is called."""
    return str(getattr(_called(function), "__module__", None) or "")


def _called(function: Any) -> Any:
    """Return a function without what it is given beforehand; of another object its class."""
    while isinstance(function, partial):
        function = function.func
    return (
        function if isinstance(function, FunctionType | MethodType | BuiltinFunctionType) else type(function)
    )


def _copied(value: Any, depth: int, left: Iterator[int]) -> Any:
    if next(left, None) is None or depth < 0:
        raise _OtherError
    kind = type(value)
    if kind in _PLAIN or isinstance(value, np.number | np.bool_):
        return value
    if kind in _TABLES:
        if kind is dict:
            return {
                name if type(name) in _PLAIN else _key(name, depth, left): _copied(one, depth - 1, left)
                for name, one in value.items()
            }
        members = [_copied(one, depth - 1, left) for one in value]
        if kind in (set, frozenset):
            return Unordered(kind, sorted(members, key=repr))
        return kind(members)
    if (holder := parts_of(value)) is not None:
        return Holding(holder[0], tuple(_copied(one, depth - 1, left) for one in holder[1]))
    if isinstance(
        value, FunctionType | MethodType | BuiltinFunctionType | np.ufunc | type
    ) and not _is_others(value):
        return _named(value)
    raise _OtherError


def _key(name: Any, depth: int, left: Iterator[int]) -> Any:
    """Return the copy of a table's key, which is one again: an equal tuple or member of an enum."""
    copy = _copied(name, depth - 1, left)
    try:
        hash(copy)
    except TypeError:
        raise _OtherError from None
    return copy


def _is_others(value: Any) -> bool:
    """Return whether it is ours, or was made inside of a function of a library: that makes it again where it needs it."""
    module, name = getattr(value, "__module__", None) or "", getattr(value, "__qualname__", "")
    return module.partition(".")[0] == "paceline" or ("<locals>" in name and not is_users(module))


def _named(value: Any) -> FunctionCopy:
    return FunctionCopy(*known(value), value)


def known(value: Any) -> tuple[str, str]:
    """Return a function's full name, and what stands for its code."""
    inner = value.__func__ if isinstance(value, MethodType) else value
    if isinstance(inner, np.ufunc):
        return f"numpy.{inner.__name__}", ""
    owner = getattr(inner, "__module__", None) or "torch"
    return f"{owner}.{getattr(inner, '__qualname__', type(inner).__name__)}", _digest(inner)


def _payload(value: Any) -> Payload | None:
    bound = getattr(value, "__self__", None)
    if getattr(value, "__closure__", None) or not (
        bound is None or hasattr(bound, "__name__") or _is_torchs(bound)
    ):
        return None
    try:
        return pack(value)
    except Exception:  # noqa: BLE001 - whatever it raises, it cannot travel
        return None


def _is_torchs(bound: Any) -> bool:
    return type(bound).__module__.partition(".")[0] == "torch" and not isinstance(bound, torch.Tensor)


def _digest(value: Any) -> str:
    if not isinstance(value, FunctionType):
        return ""
    told = hashlib.sha256(_code_digest(value.__code__))
    cells = [one.cell_contents for one in value.__closure__ or () if _is_filled(one)]
    for one in (*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()):
        simple = type(one) in _PLAIN
        told.update((repr(one) if simple else type(one).__qualname__).encode())
    return told.hexdigest()[:16]


def _is_filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


@lru_cache(maxsize=1000)
def _code_digest(code: CodeType) -> bytes:
    return hashlib.sha256(b"".join(_parts(code))).digest()


def _parts(code: CodeType) -> Iterator[bytes]:
    """Yield what tells code apart from other code; not where it lies."""
    yield code.co_code
    yield " ".join(code.co_names).encode()
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _parts(one)
        elif type(one) in (*_PLAIN, tuple):
            yield repr(one).encode()
