"""Which values a file's source fixes: every process that imports it has the same, unless it changes them afterwards.

What is computed of the environment or a file may well be another in each process.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain
from typing import TypeAlias

from paceline.training.plain_values import Record
from paceline.training.source_trees import imported, names_in, tree_of
from paceline.training.source_writes import MUTATORS, Function, functions_in, writes_of

_PURE = {
    *("abs", "bool", "dict", "divmod", "enumerate", "float", "frozenset"),
    *("int", "len", "list", "max", "min", "pow", "range"),
}
_PURE |= {"reversed", "round", "set", "slice", "sorted", "str", "sum", "tuple", "zip"}
_HARMLESS = _PURE | {"print", "isinstance", "repr", "type", "paceline"}
"""What may be given a table, and leaves it as it is."""
_ORDER_FREE = {"frozenset", "len", "max", "min", "set", "sorted"}
"""What gives the same of a set in whichever order its members come."""
_KINDS = {"staticmethod", "classmethod", "property"}
_STEADY = {"torch", "math", "numpy", "functools", "pathlib", "types", "argparse", "enum", "collections"}
"""Modules whose names stand for the same in every process."""
_MADE = {
    *("SimpleNamespace", "Namespace", "Path", "PurePath", "partial", "device"),
    *("OrderedDict", "deque", "exp", "log", "sqrt"),
}
"""What they make that is the same in every process, of the same."""
_OPEN = None
"""Stands for what a name is bound to where that may be anything."""
_Bound: TypeAlias = dict[str, list[ast.expr | None]]


def is_fixed(
    file: str | None, owner: str, name: str, *, mutable: bool, is_here: Callable[[object], bool]
) -> bool:
    """Return whether the source says what a global, or an attribute of the class `owner`, is after the import.

    `mutable` says that it is a list, a table or an object, and `is_here` whether the importing process has a value.
    """
    tree = tree_of(file)
    found = None if tree is None else scopes_of(tree, owner)
    if tree is None or found is None:
        return False
    outer, scope = found
    touched = any(
        (mutable or not one.passed) and one.key_of(owner, name) is not None
        for one in writes_of(functions_in(tree), tree)
    )
    if touched or (mutable and not owner and name in outer.passed):
        return any(is_here(one) for one in _literals(scope.bound.get(name, ())))
    put = f"{owner}.{name}"
    if not owner:
        inner = [one for one in outer.bound if one.startswith(f"{name}.")]
        return outer.fixes(name) and all(outer.fixes(one) for one in inner)
    # What the class has from nowhere in its source, the launcher has put there.
    return (name not in scope.bound or scope.fixes(name)) and (put not in outer.bound or outer.fixes(put))


def scopes_of(tree: ast.Module, owner: str) -> tuple[Scope, Scope] | None:
    """Return what the module binds, and what the class does: the same where there is none. None where it is made by others."""
    scope = outer = Scope(tree.body)
    body: list[ast.stmt] = tree.body
    for part in owner.split(".") if owner else ():
        found = next((one for one in body if isinstance(one, ast.ClassDef) and one.name == part), None)
        if found is None or found.keywords or not all(map(_is_dataclass, found.decorator_list)):
            return None
        body, scope = found.body, Scope(found.body, outer)
    return outer, scope


def _is_dataclass(decorator: ast.expr) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(called) in ("dataclass", "dataclasses.dataclass")


def _literals(bound: Iterable[ast.expr | None]) -> Iterator[object]:
    for one in bound:
        with suppress(ValueError, TypeError, SyntaxError):
            if isinstance(one, ast.Call) and not one.args:
                name = ast.unparse(one.func).rpartition(".")[2]
                given = {str(part.arg): ast.literal_eval(part.value) for part in one.keywords}
                if name in ("dict", "SimpleNamespace", "Namespace"):
                    yield given if name == "dict" else Record(name, given)
            elif one is not None:
                yield ast.literal_eval(one)


class Scope:
    """What the statements of a module or of a class bind, and to what."""

    def __init__(self, body: list[ast.stmt], outer: Scope | None = None) -> None:
        self.bound: _Bound = {}
        self.passed: set[str] = set()
        self.imported: set[str] = set()
        self.classes = {one.name: one for one in body if isinstance(one, ast.ClassDef)}
        self._outer, self._asked = outer, set[str]()
        self._read(body, [])

    def fixes(self, name: str) -> bool:
        """Return whether a name is bound here, and to nothing but what the source fixes."""
        if name in self._asked:  # it is part of itself, as in N = N + 1
            return True
        self._asked.add(name)
        bound = self.bound.get(name, [None])
        fixed = all(one is not None and self._closed(one, frozenset()) for one in bound)
        self._asked.discard(name)
        return fixed

    def _read(self, body: list[ast.stmt], given: list[ast.expr | None]) -> None:
        for node in imported(body):
            self._statement(node, given)
            tests = [*given, node.test] if isinstance(node, ast.If | ast.While) else given
            for part in ("body", "orelse", "finalbody"):
                if not isinstance(node, Function | ast.ClassDef):
                    self._read(getattr(node, part, []), tests)
            for handler in getattr(node, "handlers", []):
                self._read(handler.body, [_OPEN])

    def _statement(self, node: ast.stmt, given: list[ast.expr | None]) -> None:
        match node:
            case ast.Assign():
                for target in node.targets:
                    self._bind(target, [node.value, *given])
            case ast.AnnAssign(value=ast.expr() as value) | ast.AugAssign(value=value):
                of_sets = not isinstance(node, ast.AugAssign) or isinstance(node.op, _OF_SETS)
                self._bind(node.target, [value if of_sets else _in_order(value), *given])
            case ast.For() | ast.AsyncFor():
                self._bind(node.target, [_in_order(node.iter), *given])
            case ast.Import() | ast.ImportFrom():
                self._import(node, given)
            case ast.FunctionDef(decorator_list=by) | ast.ClassDef(decorator_list=by, keywords=[]) if all(
                _is_dataclass(one) or ast.unparse(one) in _KINDS for one in by
            ):
                self.bound.setdefault(node.name, []).extend([ast.Constant(None), *given])
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                self._open([node.name])
            case ast.With() | ast.AsyncWith():
                self._open(
                    chain.from_iterable(
                        map(names_in, filter(None, (one.optional_vars for one in node.items)))
                    )
                )
            case ast.Delete() | ast.Match():
                self._open(names_in(node))
        if not isinstance(node, Function | ast.ClassDef):
            for call in _calls(node):
                self._call(call, given)

    def _import(self, node: ast.Import | ast.ImportFrom, given: list[ast.expr | None]) -> None:
        """Note names of other modules: those of some libraries stand for the same everywhere."""
        for alias in node.names:
            name = alias.asname or alias.name.partition(".")[0]
            self.imported.add(name)
            home = (getattr(node, "module", None) or alias.name).partition(".")[0]
            steady = home in _STEADY and not (isinstance(node, ast.ImportFrom) and node.level)
            self.bound.setdefault(name, []).extend([ast.Constant(None) if steady else _OPEN, *given])

    def _open(self, names: Iterable[str]) -> None:
        """Note names that are bound to what may be anything."""
        for name in names:
            self.bound.setdefault(name, []).append(_OPEN)

    def _call(self, call: ast.Call, given: list[ast.expr | None]) -> None:
        arguments = [*call.args, *(one.value for one in call.keywords)]
        root: ast.expr = call.func
        if isinstance(root, ast.Attribute):
            if root.attr in MUTATORS:
                into = map(_in_order, arguments) if root.attr in ("extend", "extendleft") else arguments
                self._bind(ast.Subscript(root.value, ast.Constant(None), ast.Store()), [*into, *given])
            while isinstance(root, ast.Attribute):
                root = root.value
        if not (isinstance(root, ast.Name) and root.id in _HARMLESS):
            self.passed.update(one.id for one in arguments if isinstance(one, ast.Name))

    def _bind(self, target: ast.expr, values: list[ast.expr | None]) -> None:
        if isinstance(target, ast.Name):
            self.bound.setdefault(target.id, []).extend(values)
        elif isinstance(target, ast.Tuple | ast.List):
            for one in target.elts:
                self._bind(one, [value and _in_order(value) for value in values])
        elif isinstance(target, ast.Starred):
            self._bind(target.value, values)
        elif isinstance(target, ast.Subscript):
            self._bind(target.value, [*values, target.slice])
        elif isinstance(target, ast.Attribute):
            self.bound.setdefault(ast.unparse(target), []).extend(values)

    def _closed(self, node: ast.AST, bound: frozenset[str], *, stored: bool = True) -> bool:
        """Return whether an expression is made of nothing but what the source says.

        `stored` says that it is kept as it is, and not read in an order, which a set has another in each process.
        """
        if isinstance(node, ast.Name):
            known = node.id in bound or self.knows(node.id)
            return known and (stored or not self.has_set(node.id, set()))
        if isinstance(node, ast.Lambda):
            return True  # its code
        if isinstance(node, ast.Call) and not self._is_pure(node.func):
            return False
        if isinstance(node, ast.Await | ast.Yield | ast.YieldFrom | ast.NamedExpr):
            return False
        if not stored and _makes_set(node):
            return False
        if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            bound |= set(chain.from_iterable(names_in(one.target) for one in node.generators))
        return all(
            self._closed(one, bound, stored=_is_stored(one, node, within=stored))
            for one in ast.iter_child_nodes(node)
        )

    def has_set(self, name: str, asked: set[str]) -> bool:
        """Return whether a set is part of what a name stands for."""
        if name not in self.bound:
            return self._outer is not None and self._outer.has_set(name, asked)
        if name in asked:
            return False
        asked.add(name)
        found = filter(None, [*self.bound[name], self.classes.get(name)])
        return any(
            _makes_set(node) or (isinstance(node, ast.Name) and self.has_set(node.id, asked))
            for node in chain.from_iterable(map(ast.walk, found))
        )

    def _is_pure(self, called: ast.expr) -> bool:
        """Return whether a call gives the same wherever it is given the same."""
        text = ast.unparse(called)
        if isinstance(called, ast.Name):
            return text in _PURE or text in _KINDS or text in _MADE or self._is_record(text)
        root = next((one.id for one in ast.walk(called) if isinstance(one, ast.Name)), "")
        known = self.imported | (self._outer.imported if self._outer is not None else set())
        return isinstance(called, ast.Attribute) and (
            root not in known or root == "math" or text.rpartition(".")[2] in _MADE
        )

    def _is_record(self, name: str) -> bool:
        """Return whether a name is that of a dataclass of this file, which has nothing but what the source says."""
        scope = self if self._outer is None else self._outer
        found = scope.classes.get(name)
        if found is None or not found.decorator_list or not all(map(_is_dataclass, found.decorator_list)):
            return False
        fields = [one.value for one in found.body if isinstance(one, ast.AnnAssign) and one.value is not None]
        made = any(isinstance(one, Function) and one.name.startswith("__") for one in found.body)
        return not made and all(self._closed(one, frozenset()) for one in fields)

    def knows(self, name: str) -> bool:
        """Return whether code in this scope finds by a name nothing but what the source fixes."""
        if name in self.bound:
            return self.fixes(name)
        return self._outer.knows(name) if self._outer is not None else name in _PURE | _KINDS


def _makes_set(node: ast.AST) -> bool:
    called = isinstance(node, ast.Call) and ast.unparse(node.func) in ("set", "frozenset")
    return called or isinstance(node, ast.Set | ast.SetComp)


def _in_order(value: ast.expr) -> ast.expr:
    """Return an expression for the members of another one, one by one."""
    return ast.List([ast.Starred(value, ast.Load())], ast.Load())


def _is_stored(part: ast.AST, of: ast.AST, *, within: bool) -> bool:
    """Return whether a part of an expression is kept in it, or read in whichever order; `within`, whether that is."""
    match of:
        case ast.Call(func=func, keywords=keywords):
            by_name = isinstance(func, ast.Name) and func.id in _ORDER_FREE
            return isinstance(part, ast.keyword) or (by_name and not keywords)
        case ast.List() | ast.Tuple():
            return within and not isinstance(part, ast.Starred)
        case ast.BinOp(op=op):
            return within and isinstance(op, _OF_SETS)
        case ast.ListComp() | ast.GeneratorExp() | ast.FormattedValue():
            return False
    return within or isinstance(of, ast.Compare | ast.SetComp | ast.DictComp | ast.Set)


_OF_SETS = (ast.BitOr, ast.BitAnd, ast.Sub, ast.BitXor)


def _calls(statement: ast.stmt) -> Iterator[ast.Call]:
    """Return the calls in a statement itself, not those of statements inside of it."""
    for node in ast.iter_child_nodes(statement):
        if isinstance(node, ast.expr):
            yield from (one for one in ast.walk(node) if isinstance(one, ast.Call))
