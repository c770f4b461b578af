"""What a checkpoint holds of attributes that a run has changed: plain values, and functions by their names.

Nothing of it is unpickled, and a name stands for what this process has loaded already: functions and classes of the user's own
files, and torch's mathematics.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from paceline.training.attribute_holders import HOLDERS
from paceline.training.attribute_values import (
    FunctionCopy,
    Holding,
    Unordered,
    copied,
    held_back,
    known,
    opened,
)
from paceline.training.task_folder import is_users

KEY = "changed"
"""Where a checkpoint's extra state holds it."""


@dataclass(frozen=True)
class Absent:
    """Stands for the value of an attribute that is not there."""


ABSENT = Absent()


class AnObjectsError(Exception):
    """What is to be saved is a method of an object: of a layer, a file (`write`), a logger (`info`)."""


def encoded(copy: Any) -> Any:
    """Return the copy of a value as numbers, text and lists; what is none of those as a list of its kind and its parts."""
    if copy is None or type(copy) in (bool, int, float, str):
        return copy
    if isinstance(copy, np.generic):
        return ["numpy", [copy.dtype.str, copy.tobytes().hex()]]
    if isinstance(copy, FunctionCopy):
        bound = getattr(copy.value, "__self__", None)
        if isinstance(copy.value, MethodType | BuiltinFunctionType) and not _is_known(bound):
            raise AnObjectsError
        return ["function", [copy.name, copy.digest]]
    if isinstance(copy, Holding):
        return [copy.kind, [encoded(one) for one in copy.parts]]
    kind = copy.kind.__name__ if isinstance(copy, Unordered) else type(copy).__name__
    return [kind, _parts(copy)]


def _parts(copy: Any) -> list[Any]:
    if isinstance(copy, dict):
        return [[encoded(name), encoded(one)] for name, one in copy.items()]
    if isinstance(copy, Unordered | tuple | list):
        return [encoded(one) for one in (copy.members if isinstance(copy, Unordered) else copy)]
    if isinstance(copy, bytes):
        return [copy.hex()]
    return [str(copy)]


def decoded(value: Any) -> Any:
    """Return the copy that was encoded; raise ValueError, TypeError or LookupError where it was not."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    kind, parts = value
    if kind == "dict":
        return {decoded(name): decoded(one) for name, one in parts}
    parts = [decoded(one) for one in parts]
    return _holding(kind, parts) if kind in HOLDERS else _MADE_OF[kind](parts)


def _holding(kind: str, parts: list[Any]) -> Holding:
    """Return the copy of a holder, which can be made unless it names a class or function that is not there."""
    made = Holding(kind, tuple(parts))
    if held_back(made) is None and copied(opened(made)) is None:
        raise ValueError(f"{kind} does not hold plain values alone")
    return made


def _fraction(parts: list[Any]) -> Fraction:
    numerator, denominator = (int(one) for one in f"{parts[0]}/1".split("/")[:2])
    return Fraction(numerator, denominator or 1)


def _function(parts: list[Any]) -> FunctionCopy:
    name, digest = parts
    found = _found(str(name))
    return FunctionCopy(str(name), str(digest), None) if found is None else FunctionCopy(*known(found), found)


def _dtype(parts: list[Any]) -> torch.dtype:
    found = getattr(torch, str(parts[0]).removeprefix("torch."))
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{parts[0]!r:.60} is no dtype")
    return found


def _of_numpy(parts: list[Any]) -> np.generic:
    (found,) = np.frombuffer(bytes.fromhex(parts[1]), np.dtype(str(parts[0])))
    if not isinstance(found, np.number | np.bool_):
        raise TypeError(f"{parts[0]!r:.60} is no type of numbers")
    return found


_MADE_OF: dict[str, Callable[[list[Any]], Any]] = {
    "Absent": lambda _: ABSENT,
    "Decimal": lambda parts: Decimal(str(parts[0])),
    "Fraction": _fraction,
    type(Path()).__name__: lambda parts: Path(str(parts[0])),
    "bytes": lambda parts: bytes.fromhex(parts[0]),
    "complex": lambda parts: complex(parts[0]),
    "device": lambda parts: torch.device(parts[0]),
    "dtype": _dtype,
    "frozenset": lambda parts: Unordered(frozenset, parts),
    "function": _function,
    "list": list,
    "numpy": _of_numpy,
    "set": lambda parts: Unordered(set, parts),
    "tuple": tuple,
}


def _is_known(bound: Any) -> bool:
    """Return whether what a method belongs to is no object of its own: a class or a module."""
    return bound is None or hasattr(bound, "__name__")


_MATHEMATICS = {"math": math, "_operator": operator, "numpy": np}
_RUNS = ("call", "delitem", "methodcaller", "setitem")
"""Functions of these modules that compute nothing."""


def _found(name: str) -> Any:
    """Return the function or class of that name; None where it is not loaded, or is somebody else's."""
    last = name.rpartition(".")[2]
    library = name.partition(".")[0]
    if library in _MATHEMATICS:
        one = getattr(_MATHEMATICS[library], last, None)
        computes = (
            isinstance(one, np.ufunc if library == "numpy" else BuiltinFunctionType) and last not in _RUNS
        )
        return one if computes and known(one)[0] == name else None
    special = getattr(torch.special, last.removeprefix("special_"), None)
    if isinstance(special, BuiltinFunctionType) and known(special)[0] == name:
        return special
    for one in (getattr(torch, last, None), getattr(functional, last, None), getattr(torch.nn, last, None)):
        computes = isinstance(one, BuiltinFunctionType) and hasattr(torch.Tensor, last)
        is_layer = isinstance(one, type) and issubclass(one, torch.nn.Module)
        of_torch = getattr(one, "__module__", None) in (functional.__name__, functional.gelu.__module__)
        if (computes or of_torch or is_layer) and known(one)[0] == name:
            return one
    home = name
    found: Any = None
    while home and not (home in sys.modules and is_users(home)):
        home = home.rpartition(".")[0]
    if home:
        found = sys.modules[home]
        for part in name[len(home) + 1 :].split("."):
            found = vars(found).get(part) if hasattr(found, "__dict__") else None
            found = found.__func__ if isinstance(found, staticmethod) else found
    return found if isinstance(found, FunctionType | type) and known(found)[0] == name else None
