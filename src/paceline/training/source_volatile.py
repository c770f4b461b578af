"""Which values are another in each process, by their source: what is drawn, read off a clock, or says which process it is."""

from __future__ import annotations

import ast

from paceline.training.source_trees import imported, tree_of
from paceline.training.source_values import scopes_of

_CLOCKS = {
    *("time", "time_ns", "perf_counter", "monotonic", "process_time"),
    *("now", "today", "utcnow", "datetime", "strftime"),
}
_PROCESS = {
    *("getpid", "getppid", "get_ident", "gethostname"),
    *("current_process", "get_rank", "get_world_size", "__name__"),
}
_DRAWN = {
    *("uuid", "uuid1", "uuid4", "urandom", "secrets", "token_hex", "tempfile", "mkdtemp", "mkstemp"),
    *("TemporaryDirectory", "NamedTemporaryFile", "id", "object", "getnode"),
}
_SEEDED = {
    *("random", "randint", "randrange", "uniform", "choice", "choices"),
    *("sample", "gauss", "shuffle", "rand", "randn"),
    *("randperm", "normal", "rand_like", "randn_like", "empty"),
    "initial_seed",
}
"""What is the same everywhere once its library was seeded."""
_GENERATORS = {"Random", "RandomState", "default_rng"}
"""What is the same everywhere if it is given a seed."""
_SEEDING, _SEEDING_ALL = {"seed", "manual_seed"}, {"seed_everything", "set_seed"}
_LIBRARIES = {"random", "numpy", "torch"}
_LAUNCHERS = (
    *("RANK", "ROLE_", "LOCAL", "WORLD_SIZE", "GROUP", "MASTER", "PACELINE"),
    *("TORCHELASTIC", "OMP_", "SLURM", "PMI", "OMPI"),
)
"""How environment variables begin that say which process it is."""


def is_volatile(file: str | None, owner: str, name: str, part: object = None) -> bool:
    """Return whether a global, or an attribute of a class, is another in each process by what its source says.

    `part` asks for one key of a table, or one attribute of an object.
    """
    tree = tree_of(file)
    found = None if tree is None else scopes_of(tree, owner)
    if tree is None or found is None:
        return False
    outer, scope = found
    bound = [one for one in scope.bound.get(name, []) if one is not None]
    if isinstance(part, str) and part.startswith(_LAUNCHERS):  # of a copy of the environment
        return any("environ" in ast.unparse(one) for one in bound)
    return _Volatile(tree, outer.bound, part).any(bound)


class _Volatile:
    """Goes from an expression to all of the file that it is made of."""

    def __init__(self, tree: ast.Module, bound: dict[str, list[ast.expr | None]], part: object) -> None:
        self._bound, self._part = bound, part
        self._defined = {
            one.name: one for one in tree.body if isinstance(one, ast.FunctionDef | ast.ClassDef)
        }
        self._libraries: dict[str, str] = {}
        """The library that a name is of, or what it stands for."""
        for one in ast.walk(tree):
            for alias in one.names if isinstance(one, ast.Import | ast.ImportFrom) else ():
                home = getattr(one, "module", None) or alias.name
                self._libraries[(alias.asname or alias.name).partition(".")[0]] = home.partition(".")[0]
        self._seen: set[str] = set()
        self._seeded = self._seeds(list(imported(tree.body)))

    def any(self, values: list[ast.expr]) -> bool:
        """Return whether one of these expressions is volatile, or made of what is."""
        waiting: list[ast.AST] = [self._of_part(one) for one in values]
        while waiting:
            value = waiting.pop()
            for node in ast.walk(value):
                if self._is_volatile(node, value):
                    return True
                if isinstance(node, ast.Name) and node.id not in self._seen:
                    self._seen.add(node.id)
                    waiting += [one for one in self._bound.get(node.id, []) if one is not None]
                    waiting += self._made_by(node.id)
        return False

    def _is_volatile(self, node: ast.AST, within: ast.AST) -> bool:
        match node:
            case ast.Call():
                return self._call(node)
            case ast.keyword(arg="default_factory", value=made):
                return _last(made) in _CLOCKS | _PROCESS | _DRAWN
            case ast.Name(id="__name__") | ast.Attribute(attr="executable"):
                return True
            case ast.Constant(value=str(text)) if text.startswith(_LAUNCHERS):
                written = ast.unparse(within)
                return "environ" in written or "getenv" in written
        return False

    def _call(self, call: ast.Call) -> bool:
        name = _last(call.func)
        if name in _CLOCKS | _PROCESS | _DRAWN:
            return True
        if name in _GENERATORS:
            return not (call.args or call.keywords)
        if name not in _SEEDED or any(one.arg == "generator" for one in call.keywords):
            return False
        library = self._library(call.func)
        return library != "" and self._seeded.isdisjoint({library} & _LIBRARIES or _LIBRARIES)

    def _library(self, node: ast.expr) -> str:
        """Return the library whose own state a call goes by; empty where that is a generator's, a question mark if unknown."""
        match node:
            case ast.Attribute(value=inner):
                return self._library(inner)
            case ast.Call(func=made):
                return "" if _last(made) in _GENERATORS | {"Generator"} else self._library(made)
            case ast.Name(id=name):
                if name not in self._libraries:
                    self._libraries[name] = "?"  # it may be made of itself
                    bound = next(filter(None, self._bound.get(name, [])), None)
                    self._libraries[name] = "?" if bound is None else self._library(bound)
                return self._libraries[name]
        return "?"

    def _seeds(self, waiting: list[ast.stmt]) -> set[str]:
        """Return the libraries that an import of the file seeds."""
        seeded, asked = set[str](), set[str]()
        while waiting:
            part = waiting.pop()
            if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            for call in (one for one in ast.walk(part) if isinstance(one, ast.Call)):
                name = _last(call.func)
                if name in self._defined and name not in asked:
                    asked.add(name)
                    waiting += self._made_by(name)
                elif name in _SEEDING_ALL:
                    seeded |= _LIBRARIES
                elif name in _SEEDING and (call.args or call.keywords):
                    seeded |= {self._library(call.func)} & _LIBRARIES
        return seeded

    def _made_by(self, name: str) -> list[ast.stmt]:
        """Return what runs as a function or a class of this file is called."""
        found = self._defined.get(name)
        if not isinstance(found, ast.ClassDef):
            return [] if found is None else found.body
        made = [
            one
            for part in found.body
            if isinstance(part, ast.FunctionDef) and part.name in ("__init__", "__post_init__")
            for one in part.body
        ]
        made += [one for one in found.body if isinstance(one, ast.AnnAssign)]  # fields of a dataclass
        return [one for one in made if self._part is None or _assigned(one) in ("", self._part)]

    def _of_part(self, value: ast.expr) -> ast.expr:
        """Return what of an expression makes the part that is asked for; all of it where that cannot be said."""
        match value:
            case ast.Dict(keys=keys, values=values):
                parts = [(getattr(key, "value", None), one) for key, one in zip(keys, values, strict=True)]
            case ast.Call(keywords=keywords):
                parts = [(one.arg, one.value) for one in keywords]
            case _:
                return value
        return next((one for name, one in parts if name is not None and name == self._part), value)


def _assigned(statement: ast.stmt) -> str:
    """Return which attribute of an object, or field of a dataclass, a statement sets of nothing else that the object has."""
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    target = targets[0]
    inside = ast.walk(getattr(statement, "value", None) or ast.Constant(None))
    if any(isinstance(node, ast.Name) and node.id == "self" for node in inside):
        return ""
    return _last(target)


def _last(called: ast.AST | None) -> str:
    return getattr(called, "attr", "") or getattr(called, "id", "")
