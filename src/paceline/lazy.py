"""Public names that load their module on first use, so that importing a room does not import torch."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any


def call(package: str, module: str, function: str) -> None:
    """Let a package be called: a name that is a room and a verb, whose function lives in `module`, loaded with the first call."""

    class CallableModule(ModuleType):
        """A module that can be called."""

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return getattr(importlib.import_module(module), function)(*args, **kwargs)

        @property
        def __signature__(self) -> Any:
            """What a call takes: read only where somebody asks."""
            return inspect.signature(getattr(importlib.import_module(module), function))

    sys.modules[package].__class__ = CallableModule


def names(package: str, table: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's `__getattr__` and `__dir__` for a table of name to module."""

    def load(name: str) -> Any:
        if name not in table:
            with contextlib.suppress(ModuleNotFoundError):
                return importlib.import_module(f"{package}.{name}")
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(table[name]), name)
        setattr(sys.modules[package], name, value)  # so that nobody asks for it here a second time
        return value

    return load, lambda: sorted(table)
