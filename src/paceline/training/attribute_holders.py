"""What holds plain values in a class of its own, taken apart and put together: members of enums, deques, small arrays."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from enum import Enum, Flag
from functools import partial
from typing import Any

import numpy as np
import torch

_SMALL = 1000
"""How many numbers an array may hold; a larger one is data."""
_FACTORIES: dict[str, Any] = {kind.__name__: kind for kind in (dict, float, int, list, set, str, tuple)}


def parts_of(value: Any) -> tuple[str, list[Any]] | None:
    """Return the kind of a holder and what to make it of; None of anything else."""
    kind = type(value)
    if isinstance(value, Enum):
        return "enum", [kind, value.value if isinstance(value, Flag) else value.name]
    if isinstance(value, tuple) and kind is not tuple and hasattr(kind, "_fields"):
        return "namedtuple", [kind, tuple(value)]
    if kind is np.ndarray:
        plain = value.dtype.kind in "biufc" and value.size <= _SMALL
        return ("ndarray", [value.dtype.str, list(value.shape), value.tobytes()]) if plain else None
    if kind is torch.Tensor:
        return _of_tensor(value)
    taken = _TAKEN.get(kind)
    return None if taken is None else (kind.__name__, taken(value))


def made_of(kind: str, parts: Sequence[Any]) -> Any:
    """Return a holder; raise ValueError, TypeError or LookupError where it cannot be made."""
    try:
        return _MADE[kind](*parts)
    except (ArithmeticError, AttributeError, MemoryError, RuntimeError) as error:
        raise ValueError(f"{kind}: {error}") from error


def _of_tensor(value: torch.Tensor) -> tuple[str, list[Any]] | None:
    plain = value.device.type == "cpu" and value.layout is torch.strided and not value.requires_grad
    if not plain or value.numel() > _SMALL or value.is_quantized or value.is_conj() or value.is_neg():
        return None
    raw = value.detach().reshape(-1).clone().view(torch.uint8).numpy().tobytes() if value.numel() else b""
    return "Tensor", [value.dtype, list(value.shape), raw]


_TAKEN: dict[type, Callable[[Any], list[Any]]] = {
    Counter: lambda value: [list(value.items())],
    OrderedDict: lambda value: [list(value.items())],
    # Where there is one at the start its factory stays.
    defaultdict: lambda value: [getattr(value.default_factory, "__name__", ""), list(value.items())],
    deque: lambda value: [list(value), value.maxlen],
    partial: lambda value: [value.func, list(value.args), dict(value.keywords)],
}


def _member(kind: Any, name: Any) -> Any:
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise TypeError(f"{kind!r:.60} is no enum")
    return kind(name) if issubclass(kind, Flag) else kind[name]


def _named_tuple(kind: Any, members: tuple[Any, ...]) -> Any:
    if not (isinstance(kind, type) and issubclass(kind, tuple) and len(kind._fields) == len(members)):  # type: ignore[attr-defined]
        raise TypeError(f"{kind!r:.60} is no namedtuple of {len(members)}")
    return tuple.__new__(kind, members)


def _array(dtype: str, shape: list[int], raw: bytes) -> Any:
    made = np.dtype(dtype)
    if made.kind not in "biufc":
        raise TypeError(f"{dtype!r:.60} is no type of numbers")
    return np.frombuffer(raw, made).reshape(shape).copy()


def _tensor(dtype: torch.dtype, shape: list[int], raw: bytes) -> torch.Tensor:
    made = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return made.reshape(shape)


_MADE: dict[str, Callable[..., Any]] = {
    "Counter": lambda items: Counter(dict(items)),
    "OrderedDict": OrderedDict,
    "Tensor": _tensor,
    "defaultdict": lambda factory, items: defaultdict(_FACTORIES.get(factory), items),
    "deque": deque,
    "enum": _member,
    "namedtuple": _named_tuple,
    "ndarray": _array,
    "partial": lambda function, args, keywords: partial(function, *args, **keywords),
}
HOLDERS = frozenset(_MADE)
