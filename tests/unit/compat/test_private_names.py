"""Private names of torch and Python: none outside compat/, and none in it without a contract."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import paceline
from tests.unit.compat.contracts import CONTRACTS

SOURCE = Path(paceline.__file__).parent
OURS = {
    "launch/nodes/link.py": {"_break"},
    "remote/proxy.py": {"_owner", "_number", "_lease"},
    "strategies/pipeline/attributes.py": {"_name"},
    "training/run.py": {"_engine"},
}
"""Private names of classes of our own, used by functions beside them."""
PUBLIC = {"_exit", "_asdict", "_fields"}
"""Names that Python documents in spite of their underscore: os._exit, and those of named tuples."""
_PRIVATE = re.compile(r"_[a-zA-Z]\w*")
_OF_TORCH = re.compile(r"(torch|numpy)(\.\w+)*\._[a-zA-Z][\w.]*")


def test_private_names_are_in_compat_alone() -> None:
    known = set(_contracted())
    found: dict[str, list[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        file = path.relative_to(SOURCE).as_posix()
        if file.startswith("compat/"):
            continue
        tree = ast.parse(path.read_text())
        outside = [
            f"{file}:{line}: {name}"
            for line, name, is_text in _private(tree)
            if name not in PUBLIC | OURS.get(file, set()) | _defined(tree)
            and (not is_text or name in known or _OF_TORCH.fullmatch(name))
        ]
        if outside:
            found[file] = outside
    wrong = [one for lines in found.values() for one in lines]
    assert not wrong, "put them into compat/, with a contract:\n" + "\n".join(wrong)


def test_every_private_name_in_compat_has_a_contract() -> None:
    known = set(_contracted()) | {"_C", "_fields_", "_saved_"}
    missing = []
    for path in sorted((SOURCE / "compat").glob("*.py")):
        tree = ast.parse(path.read_text())
        missing += [
            f"{path.name}:{line}: {name}"
            for line, name, _ in _private(tree)
            if not set(_PRIVATE.findall(name)) <= known | _defined(tree)
        ]
    assert not missing, "\n".join(missing)


def _contracted() -> Iterator[str]:
    for file in sorted(Path(__file__).parent.glob("test_contract_*.py")):
        importlib.import_module(f"tests.unit.compat.{file.stem}")
    for names, _ in CONTRACTS:
        for name in names:
            yield from re.findall(r"(?<![a-zA-Z0-9])_[a-zA-Z]\w*", name)


def _private(tree: ast.Module) -> Iterator[tuple[int, str, bool]]:
    """Yield line and name of what begins with an underscore and is another's, and whether it stands in a text."""
    texts = {id(one.value) for one in ast.walk(tree) if isinstance(one, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr) and not _is_own(node.value):
            yield node.lineno, node.attr, False
        elif isinstance(node, ast.ImportFrom):
            for name in (*(node.module or "").split("."), *(alias.name for alias in node.names)):
                if _is_private(name):
                    yield node.lineno, name, False
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if any(map(_is_private, alias.name.split("."))):
                    yield node.lineno, alias.name, False
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            found = _PRIVATE.fullmatch(node.value) or _OF_TORCH.fullmatch(node.value)
            yield from [(node.lineno, node.value, True)] if found else ()


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _is_own(value: ast.expr) -> bool:
    is_super = isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "super"
    return is_super or (isinstance(value, ast.Name) and value.id in ("self", "cls"))


def _defined(tree: ast.Module) -> set[str]:
    """Return the private names that a file gives things at its top."""
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)}
    return found
