"""Sources of modules, read: the statements that workers run, and what of the modules' names their functions write or look at."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import TypeAlias

from paceline.training.source_writes import Function, Write, functions_in, writes_of

Reached: TypeAlias = frozenset[tuple[str, int]]
"""Functions that run, by module and first line."""


def tree_of(file: str | None) -> ast.Module | None:
    """Return a file's source, read; None where it cannot be."""
    try:
        state = Path(file or "").stat()
        return _parsed(file or "", state.st_mtime_ns, state.st_size)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


@lru_cache(maxsize=16)
def _parsed(file: str, _changed: int, _size: int) -> ast.Module:
    return ast.parse(Path(file).read_bytes())


def imported(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that workers run: none that stands under the guard."""
    for node in body:
        if isinstance(node, ast.If) and "__name__" in names_in(node.test):
            yield from imported(node.orelse)
        else:
            yield node


def names_in(node: ast.AST) -> set[str]:
    """Return the names in a part of a source."""
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def written_by(reached: Reached, files: Callable[[str], str | None]) -> list[Write]:
    """Return what the functions that run write themselves; `files` gives the file of a module."""
    found: list[Write] = []
    for module in sorted({module for module, _ in reached}):
        tree = tree_of(files(module))
        lines = {line for one, line in reached if one == module}
        if tree is not None:
            found += writes_of((one for one in functions_in(tree) if _first_line(one) in lines), tree)
    return found


def _first_line(node: Function) -> int:
    return min(one.lineno for one in (node, *node.decorator_list))


def is_read(reached: Reached, files: Callable[[str], str | None], name: str) -> bool:
    """Return whether modules that run may look at what has a name, other than to write it or to add to it."""
    trees = [tree_of(files(module)) for module in {module for module, _ in reached}]
    parts = chain.from_iterable(imported(tree.body) for tree in trees if tree is not None)
    nodes = list(chain.from_iterable(map(ast.walk, parts)))
    written = set[ast.AST]()
    for node in nodes:  # what is around comes first
        if isinstance(node, ast.Subscript) and (isinstance(node.ctx, ast.Store) or node in written):
            written.add(node.value)
    return None in trees or any(
        name in (getattr(node, part, None) for part in ("id", "attr", "value", "name", "asname"))
        and not isinstance(getattr(node, "ctx", None), ast.Store)
        for node in nodes
        if node not in written
    )
