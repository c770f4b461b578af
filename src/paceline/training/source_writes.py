"""What functions write of what is not their own: globals, attributes of classes, and what is in them."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
_Step: TypeAlias = tuple[str, Any]
_ATTRIBUTE, _ITEM = "attribute", "item"
ANY = "<any>"
"""A key or an attribute that the source does not say, or all of them."""
MUTATORS = frozenset(
    [
        *("add", "append", "appendleft", "clear", "difference_update"),
        *("discard", "extend", "extendleft", "insert"),
        *("intersection_update", "move_to_end", "pop", "popitem", "popleft", "remove", "reverse", "rotate"),
        *("setdefault", "sort", "subtract", "symmetric_difference_update", "update", "__setitem__"),
    ]
)
_LEAVING = frozenset(
    [
        *("torch", "nn", "F", "np", "numpy", "math", "json"),
        *("copy", "logging", "log", "logger", "paceline", "pprint"),
    ]
)
"""What is called by names that begin so leaves what it is given as it is."""
_CHANGING = frozenset(["setattr", "delattr", "next", "exec", "eval", "vars"])
_BEGINNINGS = ("__init__", "__post_init__", "__new__", "__setstate__", "__setattr__")


@dataclass(frozen=True)
class Write:
    """A write: the name it begins at, and the way from there to what is written."""

    root: str
    steps: tuple[_Step, ...] = ()
    passed: bool = False
    """Whether it was only given to a call that might write it."""
    beginning: bool = False
    """Whether an object writes this as it is made."""

    def key_of(self, owner: str, name: str) -> Any:
        """Return which key or attribute of a global, or of an attribute of a class, is written; ANY for all; None for none."""
        last = owner.rpartition(".")[2]
        for place in range(-1, len(self.steps)):
            if place < 0 and (owner or self.root != name):
                continue
            if place >= 0 and (self.steps[place] not in ((_ATTRIBUTE, name), (_ATTRIBUTE, ANY))):
                continue
            if place < 0 or self._holds(place, last):
                return self.steps[place + 1][1] if place + 1 < len(self.steps) else ANY
        return None

    def _holds(self, place: int, owner: str) -> bool:
        """Return whether what is before a step is the class `owner`, or a module where that is empty."""
        into = len(self.steps) > place + 1
        if not owner:
            return place == 0 and self.root not in ("self", "cls")
        if place == 0:
            # What `self` is set is the object's own; what is in a table that it finds in its class is the class's.
            return self.root in (owner, "cls") or into
        return self.steps[place - 1] in ((_ATTRIBUTE, owner), (_ATTRIBUTE, "__class__")) or into


def writes_of(functions: Iterable[Function], tree: ast.Module) -> Iterator[Write]:
    """Yield what functions of a file write."""
    for function in functions:
        yield from _Body(function, tree).writes()


def functions_in(tree: ast.AST) -> Iterator[Function]:
    """Yield all functions of a file."""
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def own_attributes(writes: Iterable[Write]) -> set[str]:
    """Return the attributes that objects write of themselves after they are made."""
    return {str(one.steps[0][1]) for one in writes if one.root == "self" and one.steps and not one.beginning}


class _Body:
    """The statements of one function, without those of functions inside of it."""

    def __init__(self, function: Function, tree: ast.Module | None) -> None:
        self._tree, self._function = tree, function
        self._nodes = list(_inside(function))
        declared = {name for node in self._nodes if isinstance(node, ast.Global) for name in node.names}
        stored = {
            one.id for one in self._nodes if isinstance(one, ast.Name) and not isinstance(one.ctx, ast.Load)
        }
        self.arguments = {one.arg for one in ast.iter_child_nodes(function.args) if isinstance(one, ast.arg)}
        self._declared, self._own = declared, (stored | self.arguments) - declared - {"self", "cls"}
        self._aliases: dict[str, Write] = {}
        for _ in range(2):  # an alias of an alias
            for node in self._nodes:
                self._alias(node)

    def writes(self, *, of_arguments: bool = False) -> Iterator[Write]:
        """Yield the writes of what is not the function's own; or those of what it is given."""
        beginning, given = self._function.name in _BEGINNINGS, self.arguments - {"self", "cls"}
        for one in self._all():
            if one.root in given if of_arguments else one.root not in self._own:
                yield Write(one.root, one.steps, one.passed, beginning)

    def _all(self) -> Iterator[Write]:
        for node in self._nodes:
            match node:
                case ast.Name(ctx=ast.Store() | ast.Del(), id=name) if name in self._declared:
                    yield Write(name)
                case ast.AugAssign(target=ast.Name(id=name)) if name in self._aliases:
                    yield from self._into(self._aliases[name])
                case ast.Subscript(ctx=ast.Store() | ast.Del()) | ast.Attribute(ctx=ast.Store() | ast.Del()):
                    yield from filter(None, [self._chain(node)])
                case ast.Call():
                    yield from self._call(node)

    def _call(self, call: ast.Call) -> Iterator[Write]:
        called = call.func
        if isinstance(called, ast.Attribute):
            in_place = called.attr.endswith("_") and not called.attr.startswith("_")  # torch's own
            if called.attr in MUTATORS or in_place:
                yield from self._into(self._chain(called.value), call)
        if isinstance(called, ast.Name) and called.id in ("setattr", "delattr") and len(call.args) > 1:
            holder, name = self._chain(call.args[0]), call.args[1]
            if holder is not None:
                attribute = name.value if isinstance(name, ast.Constant) else ANY
                yield Write(holder.root, (*holder.steps, (_ATTRIBUTE, attribute)))
        elif not self._leaves(called):
            for given in [*call.args, *(one.value for one in call.keywords if one.arg)]:
                is_named = isinstance(given, ast.Name | ast.Attribute | ast.Subscript)
                chain = self._chain(given) if is_named else None
                if chain is not None and chain.root not in ("self", "cls"):
                    yield Write(chain.root, (*chain.steps, (_ITEM, ANY)), passed=True)

    def _leaves(self, called: ast.expr) -> bool:
        """Return whether a call leaves what it is given as it is."""
        if isinstance(called, ast.Attribute):
            root: ast.expr = called
            while isinstance(root, ast.Attribute):
                root = root.value
            return isinstance(root, ast.Constant) or (isinstance(root, ast.Name) and root.id in _LEAVING)
        if not isinstance(called, ast.Name):
            return False
        name = called.id
        defined = [one for one in getattr(self._tree, "body", []) if getattr(one, "name", None) == name]
        if not defined:
            return hasattr(builtins, name) and name not in _CHANGING
        made = [one for part in defined if isinstance(part, ast.ClassDef) for one in part.body]
        runs = [*defined, *(one for one in made if getattr(one, "name", "") in _BEGINNINGS)]
        functions = [one for one in runs if isinstance(one, Function)]
        return not any(True for one in functions for _ in _Body(one, None).writes(of_arguments=True))

    def _alias(self, node: ast.AST) -> None:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.NamedExpr(target=ast.Name(id=name), value=value)
            ):
                steps: tuple[_Step, ...] = ()
            case ast.For(target=ast.Name(id=name), iter=value):
                steps = ((_ITEM, ANY),)
            case _:
                return
        if name not in self._own or not isinstance(value, ast.Name | ast.Attribute | ast.Subscript):
            return
        chain = self._chain(value)
        if chain is not None and chain.root != name:
            self._aliases[name] = Write(chain.root, (*chain.steps, *steps))

    def _chain(self, node: ast.expr) -> Write | None:
        """Return the way to what an expression names, from a name that is not the function's own."""
        steps: list[_Step] = []
        while True:
            match node:
                case ast.Attribute(value=inner, attr=attribute):
                    steps.insert(0, (_ATTRIBUTE, attribute))
                case ast.Subscript(value=inner, slice=key):
                    constant = isinstance(key, ast.Constant)
                    steps.insert(0, (_ITEM, key.value if constant else ANY))  # type: ignore[attr-defined]
                case ast.Call(func=ast.Name(id="type"), args=[ast.Name(id="self")]):
                    return Write("cls", tuple(steps))
                case ast.Call(func=ast.Attribute(value=inner, attr="setdefault" | "get")):
                    steps.insert(0, (_ITEM, ANY))
                case ast.Name(id=name):
                    break
                case _:
                    return None
            node = inner
        if name == "self" and steps[:1] == [(_ATTRIBUTE, "__class__")]:
            return Write("cls", tuple(steps[1:]))
        known = self._aliases.get(name)
        return Write(name, tuple(steps)) if known is None else Write(known.root, (*known.steps, *steps))

    @staticmethod
    def _into(write: Write | None, call: ast.Call | None = None) -> Iterator[Write]:
        """Yield that a table itself is changed, and at which keys where the call says them."""
        if write is None:
            return
        keys: list[Any] = [ANY]
        if call is not None and isinstance(call.func, ast.Attribute) and call.func.attr == "update":
            named = [one.arg for one in call.keywords]
            keys = named if named and None not in named and not call.args else keys
        for key in keys:
            yield Write(write.root, (*write.steps, (_ITEM, key)))


def _inside(function: Function) -> Iterator[ast.AST]:
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop(0)
        yield node
        if not isinstance(node, Function):
            waiting += ast.iter_child_nodes(node)
