"""Which values a file's source fixes: every process that imports it has the same, unless it changes them afterwards.

What is computed of the time, the environment, a process's number or a file may well be another in each process; so may what the
code that runs writes itself: a counter, a cache.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TypeAlias

Reached: TypeAlias = frozenset[tuple[str, int]]
"""Functions that run, by module and first line."""
_PURE = {
    "abs",
    "bool",
    "dict",
    "divmod",
    "enumerate",
    "float",
    "frozenset",
    "int",
    "len",
    "list",
    "max",
    "min",
    "pow",
    "range",
}
_PURE |= {"reversed", "round", "set", "slice", "sorted", "str", "sum", "tuple", "zip"}
_HARMLESS = _PURE | {"print", "isinstance", "repr", "type", "paceline"}
"""What may be given a table, and leaves it as it is."""
_MUTATORS = frozenset(
    [
        "add",
        "append",
        "appendleft",
        "clear",
        "discard",
        "extend",
        "insert",
        "pop",
        "popitem",
        "remove",
        "setdefault",
        "update",
    ]
)
_OPEN = None
"""Stands for what a name is bound to where that may be anything."""
_Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
_Bound: TypeAlias = dict[str, list[ast.expr | None]]


def is_fixed(
    file: str | None, owner: str, name: str, *, mutable: bool, is_here: Callable[[object], bool]
) -> bool:
    """Return whether the source says what a global, or an attribute of the class `owner`, is after the import.

    `mutable` says that it is a list or a table, and `is_here` whether the importing process has a value.
    """
    tree = _tree(file)
    if tree is None:
        return False
    outer = _Scope(tree.body)
    if not owner:
        if _is_touched(tree, name) or (mutable and name in outer.passed):
            return any(is_here(one) for one in _literals(outer.bound.get(name, ())))
        return outer.fixes(name)
    body: list[ast.stmt] = tree.body
    scope = outer
    for part in owner.split("."):
        found = next((one for one in body if isinstance(one, ast.ClassDef) and one.name == part), None)
        if found is None or found.decorator_list or found.keywords:
            return False
        body, scope = found.body, _Scope(found.body, outer)
    if _is_touched(tree, name):
        return any(is_here(one) for one in _literals(scope.bound.get(name, ())))
    put = f"{owner}.{name}"
    # What the class has from nowhere in its source, the launcher has put there.
    return (name not in scope.bound or scope.fixes(name)) and (put not in outer.bound or outer.fixes(put))


def _is_touched(tree: ast.Module, name: str) -> bool:
    """Return whether some function writes a name: it may have been called at the import."""
    return any(_writes(node, name) for node in ast.walk(tree) if isinstance(node, _Function))


def _literals(bound: Iterable[ast.expr | None]) -> Iterator[object]:
    for one in bound:
        if one is not None:
            with suppress(ValueError, TypeError, SyntaxError):
                yield ast.literal_eval(one)


def is_written(name: str, reached: Reached, files: Mapping[str, str | None]) -> bool:
    """Return whether a function that runs writes a name itself."""
    for module in sorted({module for module, _ in reached}):
        tree = _tree(files.get(module))
        lines = {line for one, line in reached if one == module}
        for node in ast.walk(tree) if tree is not None else ():
            if isinstance(node, _Function) and _first_line(node) in lines and _writes(node, name):
                return True
    return False


def _first_line(node: _Function) -> int:
    return min(one.lineno for one in (node, *node.decorator_list))


def _writes(function: _Function, name: str) -> bool:
    return any(_is_write(node, name) for node in ast.walk(function))


def _is_write(node: ast.AST, name: str) -> bool:
    match node:
        case ast.Global():
            return name in node.names
        case ast.Subscript(ctx=ast.Store() | ast.Del()):
            return _last(node.value) == name
        case ast.Attribute(value=ast.Name(id="self")):
            return False
        case ast.Attribute(ctx=ast.Store() | ast.Del()):
            return node.attr == name
        case ast.Call(func=ast.Attribute() as called):
            return called.attr in _MUTATORS and _last(called.value) == name
    return False


def _last(node: ast.expr) -> str | None:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None


def _tree(file: str | None) -> ast.Module | None:
    try:
        return ast.parse(Path(file or "").read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None


class _Scope:
    """What the statements of a module or of a class bind, and to what."""

    def __init__(self, body: list[ast.stmt], outer: _Scope | None = None) -> None:
        self.bound: _Bound = {}
        self.passed: set[str] = set()
        self._outer, self._asked = outer, set[str]()
        self._read(body, [])

    def fixes(self, name: str) -> bool:
        """Return whether a name is bound here, and to nothing but what the source fixes."""
        if name in self._asked:  # it is part of itself, as in N = N + 1
            return True
        self._asked.add(name)
        try:
            return name in self.bound and all(
                one is not None and self._closed(one, frozenset()) for one in self.bound[name]
            )
        finally:
            self._asked.discard(name)

    def _read(self, body: list[ast.stmt], given: list[ast.expr | None]) -> None:
        for node in body:
            if isinstance(node, ast.If) and "__name__" in _names(node.test):
                self._read(node.orelse, given)  # what stands under the guard no worker runs
                continue
            self._statement(node, given)
            tests = [*given, node.test] if isinstance(node, ast.If | ast.While) else given
            for part in ("body", "orelse", "finalbody"):
                if not isinstance(node, _Function | ast.ClassDef):
                    self._read(getattr(node, part, []), tests)
            for handler in getattr(node, "handlers", []):
                self._read(handler.body, [_OPEN])

    def _statement(self, node: ast.stmt, given: list[ast.expr | None]) -> None:
        match node:
            case ast.Assign():
                for target in node.targets:
                    self._bind(target, [node.value, *given])
            case ast.AnnAssign(value=ast.expr() as value) | ast.AugAssign(value=value):
                self._bind(node.target, [value, *given])
            case ast.For() | ast.AsyncFor():
                self._bind(node.target, [node.iter, *given])
            case ast.Import() | ast.ImportFrom():
                self._open(alias.asname or alias.name.partition(".")[0] for alias in node.names)
            case ast.FunctionDef(decorator_list=[]):
                self.bound.setdefault(node.name, []).extend([ast.Constant(None), *given])
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                self._open([node.name])
            case ast.With() | ast.AsyncWith():
                self._open(
                    chain.from_iterable(map(_names, filter(None, (one.optional_vars for one in node.items))))
                )
            case ast.Delete() | ast.Match():
                self._open(_names(node))
        if not isinstance(node, _Function | ast.ClassDef):
            for call in _calls(node):
                self._call(call, given)

    def _open(self, names: Iterable[str]) -> None:
        """Note names that are bound to what may be anything."""
        for name in names:
            self.bound.setdefault(name, []).append(_OPEN)

    def _call(self, call: ast.Call, given: list[ast.expr | None]) -> None:
        arguments = [*call.args, *(one.value for one in call.keywords)]
        root: ast.expr = call.func
        if isinstance(root, ast.Attribute):
            if root.attr in _MUTATORS:
                self._bind(ast.Subscript(root.value, ast.Constant(None), ast.Store()), [*arguments, *given])
            while isinstance(root, ast.Attribute):
                root = root.value
        if not (isinstance(root, ast.Name) and root.id in _HARMLESS):
            self.passed.update(one.id for one in arguments if isinstance(one, ast.Name))

    def _bind(self, target: ast.expr, values: list[ast.expr | None]) -> None:
        if isinstance(target, ast.Name):
            self.bound.setdefault(target.id, []).extend(values)
        elif isinstance(target, ast.Tuple | ast.List):
            for one in target.elts:
                self._bind(one, values)
        elif isinstance(target, ast.Starred):
            self._bind(target.value, values)
        elif isinstance(target, ast.Subscript):
            self._bind(target.value, [*values, target.slice])
        elif isinstance(target, ast.Attribute):
            self.bound.setdefault(ast.unparse(target), []).extend(values)

    def _closed(self, node: ast.AST, bound: frozenset[str]) -> bool:
        """Return whether an expression is made of nothing but what the source says."""
        if isinstance(node, ast.Name):
            return node.id in bound or self.knows(node.id)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id not in _PURE:
            return False
        if isinstance(node, ast.Lambda | ast.Await | ast.Yield | ast.YieldFrom | ast.NamedExpr):
            return False
        if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            bound |= set(chain.from_iterable(_names(one.target) for one in node.generators))
        return all(self._closed(one, bound) for one in ast.iter_child_nodes(node))

    def knows(self, name: str) -> bool:
        """Return whether code in this scope finds by a name nothing but what the source fixes."""
        if name in self.bound:
            return self.fixes(name)
        return self._outer.knows(name) if self._outer is not None else name in _PURE


def _names(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def _calls(statement: ast.stmt) -> Iterator[ast.Call]:
    """Return the calls in a statement itself, not those of statements inside of it."""
    for node in ast.iter_child_nodes(statement):
        if isinstance(node, ast.expr):
            yield from (one for one in ast.walk(node) if isinstance(one, ast.Call))
