"""What functools makes of a function, taken apart: it pickles by a name that no worker finds, or holds a lock."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

from paceline.training.script import MAIN

_Cached = type(functools.cache(len))


def is_dispatching(value: FunctionType) -> bool:
    """Return whether it is what `functools.singledispatch` makes of a function."""
    return {"registry", "dispatch", "register"} <= vars(value).keys() and hasattr(value, "__wrapped__")


def take_apart_dispatching(value: FunctionType) -> tuple[Any, ...]:
    """Return how it is made again: its cache of types stays here."""
    kinds: dict[type, Callable[..., Any]] = dict(vars(value)["registry"])
    return _dispatching, (vars(value)["__wrapped__"], kinds)


def _dispatching(plain: Callable[..., Any], kinds: Mapping[type, Callable[..., Any]]) -> Callable[..., Any]:
    made = functools.singledispatch(plain)
    for kind, function in kinds.items():
        made.register(kind, function)
    return made


def _take_apart_cached(value: Any) -> str | tuple[Any, ...]:
    module, name = sys.modules.get(value.__module__), str(value.__qualname__)
    if value.__module__ != MAIN and getattr(module, name, None) is value:
        return name
    return _cached, (value.__wrapped__, value.cache_parameters())


def _cached(plain: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    made: Callable[..., Any] = functools.lru_cache(**options)(plain)
    return made


def _take_apart_property(value: functools.cached_property[Any]) -> tuple[Any, ...]:
    return _property, (value.func, value.attrname)


def _property(plain: Callable[[Any], Any], name: str | None) -> functools.cached_property[Any]:
    made = functools.cached_property(plain)
    made.attrname = name  # a class that is put together again does not tell it
    return made


REDUCERS: Mapping[type, Callable[[Any], Any]] = {
    _Cached: _take_apart_cached,
    functools.cached_property: _take_apart_property,
}
"""How such values are taken apart, by their types. A cache begins empty on each worker."""
