"""No file of the package imports itself through others; imports inside functions and for type checkers count."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import paceline

SOURCE = Path(paceline.__file__).parent


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")


def imported(path: Path, modules: set[str]) -> set[str]:
    """Name what a file imports: a module, or the package that a name is taken from."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports by a relative name"
            package = str(node.module)
            whole = {f"{package}.{name.name}" for name in node.names}
            found |= {name if name in modules else package for name in whole}
    return found & modules


def test_no_file_imports_itself_through_others():
    paths = {module_of(path): path for path in SOURCE.rglob("*.py")}
    graph = {name: imported(path, set(paths)) for name, path in paths.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("a circle of imports: " + " <- ".join(error.args[1]))
