"""Goes from a function or a class to all of the user's code that it names, and notes the values that this code reads."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from functools import cache, cached_property, partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from paceline.compat.code_names import Names, names_of
from paceline.training.plain_values import OTHER, plain
from paceline.training.script import MAIN, name_across, script
from paceline.training.task_folder import is_own, is_users

_MOST = 20_000
"""How many functions, classes and modules are gone through."""
_AROUND = {
    **dict.fromkeys((classmethod, staticmethod, MethodType), "__func__"),
    type(cache(len)): "__wrapped__",
    cached_property: "func",
}
"""What stands around a function, and where that is."""


class Walk:
    """Goes from a function or a class to all of the user's code that it names, as far as that is in files."""

    def __init__(self) -> None:
        self.reached: set[tuple[str, int]] = set()
        self.attributes: set[str] = set()
        self.any_attribute = False
        """Whether the code reads attributes by names that are not in it."""
        self._found: dict[tuple[str, str, str], Any] = {}
        self._of_libraries: set[tuple[str, str, str]] = set()
        """What a class of a library, or paceline, reads of a class of the user's."""
        self._shadowed: set[tuple[str, str, str]] = set()
        self._kept: list[Any] = []
        self._seen: set[int] = set()
        self._read: set[tuple[int, Names]] = set()
        self._waiting: deque[Any] = deque()

    def visit(self, value: Any) -> None:
        """Go through a function, a class, or the class of an object, and on to what these name."""
        self._waiting.append(value)
        while self._waiting and len(self._seen) < _MOST:
            one = self._waiting.popleft()
            if id(one) in self._seen:
                continue
            self._seen.add(id(one))
            self._kept.append(one)  # the next object would take its place, and its id
            try:
                self._visit(one)
            except Exception:  # noqa: BLE001, S112  (a user's object may raise whatever it likes when it is looked at)
                continue

    @property
    def found(self) -> dict[tuple[str, str, str], Any]:
        """What the code reads, by module, class (empty for a global) and name; described."""
        return {
            key: value
            for key, value in self._found.items()
            if key not in self._shadowed
            and (not key[1] or self.any_attribute or key[2] in self.attributes or key in self._of_libraries)
        }

    def _visit(self, value: Any) -> None:
        kind = type(value)
        if kind is partial:
            self._waiting += (value.func, *value.args, *value.keywords.values())
        elif kind in _AROUND:
            self._waiting.append(getattr(value, _AROUND[kind]))
        elif kind is FunctionType:
            self._function(value)
        elif kind is property:
            self._waiting += (value.fget, value.fset)
        elif issubclass(kind, type):
            for one in type.__dict__["__mro__"].__get__(value):
                if is_users(one.__module__):
                    self._class(one, value)
        elif not issubclass(kind, ModuleType):
            self._object(value, kind)

    def _object(self, value: Any, kind: type) -> None:
        """Go through the class of an object; what the object has itself goes with it, and counts."""
        self._waiting.append(kind)
        if not is_users(kind.__module__):
            return
        for name in object.__getattribute__(value, "__dict__"):
            self._shadowed.update(
                (name_across(one.__module__), one.__qualname__, name) for one in kind.__mro__
            )

    def _function(self, function: FunctionType) -> None:
        held = function.__globals__
        module = held.get("__name__", "")
        if not is_users(module):
            return
        names = names_of(function.__code__)
        self.attributes |= names.attributes
        self.any_attribute = self.any_attribute or names.any_attribute
        self.reached.update((name_across(module), line) for line in _lines(function.__code__))
        for cell in function.__closure__ or ():
            try:
                self._follow(cell.cell_contents, names)
            except ValueError:  # it is empty yet
                continue
        for bound in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._follow(bound, names)
        if wrapped := vars(function).get("__wrapped__"):
            self._waiting.append(wrapped)
        for name in sorted(names.globals):
            if name in held:
                self._note(module, "", name, held[name])
                self._follow(held[name], names)
        for name in sorted(names.imported):  # inside of the function
            parts = name.split(".")
            for length in range(1, len(parts) + 1):
                if is_own(there := sys.modules.get(".".join(parts[:length]))):
                    self._follow(there, names)

    def _follow(self, value: Any, names: Names) -> None:
        """Go on with what a name stands for; of a module, with what is read of it."""
        kind = type(value)
        if not issubclass(kind, ModuleType):
            known = kind in (FunctionType, partial, property, *_AROUND) or issubclass(kind, type)
            if known or is_users(kind.__module__):
                self._waiting.append(value)
        elif is_own(value) and (id(value), names) not in self._read:
            self._read.add((id(value), names))
            held = ModuleType.__getattribute__(value, "__dict__")
            for name in sorted(names.attributes & held.keys()):
                self._note(held.get("__name__", ""), "", name, held[name])
                self._follow(held[name], names)

    def _class(self, kind: type, of: type) -> None:
        by_others = {
            name
            for one in of.__mro__
            if one is not object and not is_users(one.__module__)
            for name in vars(one)
        }
        for name, value in list(vars(kind).items()):
            if type(value) in (FunctionType, property, *_AROUND):
                self._waiting.append(value)
            if not name.startswith("__"):
                key = self._note(kind.__module__, kind.__qualname__, name, value)
                if name in by_others:
                    self._of_libraries.add(key)

    def _note(self, module: str, owner: str, name: str, value: Any) -> tuple[str, str, str]:
        key = name_across(module), owner, name
        travels = key[0] == MAIN and script() is None
        if key not in self._found and not name.startswith("__") and "<" not in owner and not travels:
            described = plain(value)
            if described != OTHER:
                self._found[key] = described
        return key


def _lines(code: CodeType) -> Iterator[int]:
    waiting = [code]
    while waiting:
        one = waiting.pop()
        yield one.co_firstlineno
        waiting += [inner for inner in one.co_consts if isinstance(inner, CodeType)]
