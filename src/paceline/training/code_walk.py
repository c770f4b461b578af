"""Goes from a function or a class to all of the user's code that it names, and notes the plain values that this code reads."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from paceline.training.by_value import names_in
from paceline.training.plain_values import OTHER, plain, plain_attribute
from paceline.training.script import MAIN, MAIN_ALIAS, script
from paceline.training.task_folder import is_own


class Walk:
    """Goes from a function or a class to all of the user's code that it names, as far as that is in files."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str, str], Any] = {}
        self.reached: set[tuple[str, int]] = set()
        self._seen: set[int] = set()
        self._read: set[tuple[int, frozenset[str]]] = set()

    def visit(self, value: Any) -> None:
        """Go through a function, a class, or the class of an object."""
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self.visit(part)
        elif isinstance(value, MethodType | classmethod | staticmethod):
            self.visit(value.__func__)
        elif isinstance(value, FunctionType):
            self._function(value)
        elif isinstance(value, property):
            self.visit(value.fget)
        elif isinstance(value, type):
            for kind in value.__mro__:
                if kind.__module__ == MAIN or is_own(sys.modules.get(kind.__module__)):
                    self._class(kind)
        elif not isinstance(value, ModuleType):
            self._object(value)

    def _object(self, value: Any) -> None:
        """Go through the class of an object; what the object has itself goes with it, and counts."""
        kind = type(value)
        self.visit(kind)
        own = getattr(value, "__dict__", {}) if is_own(sys.modules.get(kind.__module__)) else {}
        for name in own:
            for one in kind.__mro__:
                self.found.pop((module_name(one.__module__), one.__qualname__, name), None)

    def _function(self, function: FunctionType) -> None:
        held = function.__globals__
        module = held.get("__name__", "")
        if not (is_own(sys.modules.get(module)) or module == MAIN):
            return
        names = frozenset(names_in(function.__code__))
        self.reached.update((module_name(module), line) for line in _lines(function.__code__))
        for cell in function.__closure__ or ():
            try:
                self._follow(cell.cell_contents, names)
            except ValueError:  # it is empty yet
                continue
        if wrapped := getattr(function, "__wrapped__", None):
            self.visit(wrapped)
        for name in sorted(names):
            if name in held:
                self._note(module, "", name, held[name])
                self._follow(held[name], names)
            elif is_own(there := sys.modules.get(name)):  # imported inside of the function
                self._follow(there, names)

    def _follow(self, value: Any, names: frozenset[str]) -> None:
        """Go on with what a name stands for; of a module, with what is read of it."""
        if not isinstance(value, ModuleType):
            if isinstance(value, FunctionType | type | partial) or is_own(
                sys.modules.get(type(value).__module__)
            ):
                self.visit(value)
        elif is_own(value) and (id(value), names) not in self._read:
            self._read.add((id(value), names))
            for name in sorted(names & vars(value).keys()):
                self._note(value.__name__, "", name, vars(value)[name])
                self._follow(vars(value)[name], names)

    def _class(self, kind: type) -> None:
        for name, value in list(vars(kind).items()):
            if isinstance(value, FunctionType | property | classmethod | staticmethod):
                self.visit(value)
            if not name.startswith("__"):
                self._note(kind.__module__, kind.__qualname__, name, value)

    def _note(self, module: str, owner: str, name: str, value: Any) -> None:
        copied = plain_attribute(value) if owner else plain(value)
        travels = module_name(module) == MAIN and script() is None
        if copied is not OTHER and not name.startswith("__") and "<" not in owner and not travels:
            self.found[module_name(module), owner, name] = copied


def module_name(name: str) -> str:
    """Return the name of a module in the process that launches: a worker has the script under another."""
    return MAIN if name == MAIN_ALIAS else name


def _lines(code: CodeType) -> Iterator[int]:
    yield code.co_firstlineno
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _lines(one)
