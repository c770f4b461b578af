"""Plain copies of values, to compare them across processes: numbers, text, and lists and tables of them."""

from __future__ import annotations

import math
from types import FunctionType
from typing import Any

_DEEPEST, _LONGEST = 5, 1000
"""How deep and how long what is compared may be; a longer table is data."""
_SHOWN = 60
_RECORDS = ("Namespace", "SimpleNamespace")


class Word(str):
    """Stands for a value that is none of the plain ones, by name."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


OTHER = Word("an object")
ABSENT = Word("absent")


def plain(value: Any) -> Any:
    """Return a plain copy of a value, the parts of a table that are not plain left out; OTHER where it is not plain itself."""
    left = [_LONGEST]
    made = _copied(value, _DEEPEST, left)
    return made if left[0] >= 0 else OTHER


def plain_attribute(value: Any) -> Any:
    """Return the same of an attribute of a class; of a method, what it was defined as."""
    return Word(value.__qualname__) if isinstance(value, FunctionType) else plain(value)


def _copied(value: Any, depth: int, left: list[int]) -> Any:
    left[0] -= 1
    if depth < 0 or left[0] < 0:
        return OTHER
    if isinstance(value, list | tuple):
        parts = [_copied(one, depth - 1, left) for one in value[: _LONGEST + 1]]
        return parts if all(one is not OTHER for one in parts) else OTHER
    if type(value).__name__ in _RECORDS or hasattr(type(value), "__dataclass_fields__"):
        value = getattr(value, "__dict__", None)
    if isinstance(value, dict):
        if len(value) > _LONGEST:
            return OTHER
        copied = {str(name): _copied(one, depth - 1, left) for name, one in list(value.items())}
        return {name: one for name, one in copied.items() if one is not OTHER}
    return _single(value)


def _single(value: Any) -> Any:
    if value is None or isinstance(value, bool | Word):
        return value
    kind = type(value)
    if kind.__module__ == "numpy" and getattr(value, "shape", None) == ():
        value = value.item()
    if kind.__module__ == "torch" and kind.__name__ in ("dtype", "device"):
        return Word(str(value))
    return next((kind(value) for kind in (int, float, str) if isinstance(value, kind)), OTHER)


def same(one: Any, other: Any) -> bool:
    """Return whether two plain values are equal; what is no number equals itself."""
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one) and math.isnan(other):
        return True
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    return bool(one == other)


def shown(value: Any) -> str:
    """Return a value for a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
