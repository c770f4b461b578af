"""What other workers may call here, and what may travel in a call: nothing that was not registered."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from paceline.errors import CallRefusedError, InputError

Class = TypeVar("Class", bound=type)
Function = TypeVar("Function", bound=Callable[..., Any])

_MAIN = ("__main__", "__mp_main__")
_IDEMPOTENT = "__paceline_idempotent__"
BATCHED = "__paceline_batched__"


@dataclass(frozen=True)
class Description:
    """What a service offers."""

    made_by: type
    methods: dict[str, Callable[..., Any]]


_services: dict[str, Description] = {}
_functions: dict[str, Callable[..., Any]] = {}
_values: dict[tuple[str, str], Any] = {}


def address_of(thing: Any) -> str:
    """Return the name under which all workers know a class or a function: `module:name`."""
    module = "__main__" if thing.__module__ in _MAIN else thing.__module__
    return f"{module}:{thing.__qualname__}"


def service(made_by: Class) -> Class:
    """Let other workers create this class here and call its public methods."""
    _check_reachable(made_by)
    methods: dict[str, Callable[..., Any]] = {
        name: value
        for name, value in inspect.getmembers(made_by, inspect.isfunction)
        if not name.startswith("_")
    }
    if not methods:
        raise InputError(
            f"{made_by.__qualname__} has no public method that a worker could call. Add one, or leave out @remote.service."
        )
    _services[address_of(made_by)] = Description(made_by, methods)
    return made_by


def function(called: Function) -> Function:
    """Let other workers call this function here."""
    _check_reachable(called)
    _functions[address_of(called)] = called
    return called


def allow(made_by: Class) -> Class:
    """Let values of this class travel in calls: a dataclass, an enum, an exception of your own."""
    _check_reachable(made_by)
    _values[made_by.__module__, made_by.__qualname__] = made_by
    for alias in _MAIN if made_by.__module__ in _MAIN else ():
        _values[alias, made_by.__qualname__] = made_by
    return made_by


def idempotent(called: Function) -> Function:
    """Mark that a method may be called once more when nobody knows whether the first call arrived."""
    setattr(called, _IDEMPOTENT, True)
    return called


def is_idempotent(called: Callable[..., Any]) -> bool:
    """Return whether a method was marked so."""
    return getattr(called, _IDEMPOTENT, False)


def described(made_by: type) -> Description:
    """Return what a class offers, or refuse one that was not registered."""
    found = _services.get(address_of(made_by))
    if found is None:
        raise InputError(
            f"{made_by.__qualname__} is no service: put @remote.service above the class, so that workers know they may run it."
        )
    return found


def find_service(address: str) -> Description:
    """Return a registered service by its address, for a call that came in."""
    _load_own(address)
    if address not in _services:
        raise CallRefusedError(f"{address} is not registered as a service on this worker.")
    return _services[address]


def find_function(address: str) -> Callable[..., Any]:
    """Return a registered function by its address, for a call that came in."""
    _load_own(address)
    if address not in _functions:
        raise CallRefusedError(f"{address} is not registered as a function on this worker.")
    return _functions[address]


def check_function(called: Callable[..., Any]) -> str:
    """Return a function's address, or say what is missing."""
    address = address_of(called)
    if _functions.get(address) is None:
        raise InputError(
            f"{called.__qualname__} may not be called on other workers: put @remote.function above it."
        )
    return address


def value_type(module: str, name: str) -> Any | None:
    """Return a class whose values may travel, if it was registered."""
    return _values.get((module, name))


def travels(address: str) -> Any | None:
    """Return a class whose values may travel by its address: a registered one, or an exception of Python's or of ours."""
    module, _, name = address.partition(":")
    return value_type(module, name) or exception_type(address)


def exception_type(address: str) -> type[Exception] | None:
    """Return the class of an exception that comes from another worker: Python's own, ours, or a registered one."""
    module, _, name = address.partition(":")
    if module in ("builtins", "paceline.errors"):
        found = getattr(importlib.import_module(module), name, None)
    else:
        found = value_type(module, name)
    return found if isinstance(found, type) and issubclass(found, Exception) else None


def _load_own(address: str) -> None:
    """Import the module of one of paceline's own services: a worker need not have used it itself."""
    module = address.partition(":")[0]
    if module.startswith("paceline.") and module not in sys.modules:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(module)


def _check_reachable(thing: Any) -> None:
    if "<locals>" in thing.__qualname__:
        raise InputError(
            f"{thing.__qualname__} is defined inside a function, where other workers cannot find it. "
            "Define it at the top of its module."
        )
