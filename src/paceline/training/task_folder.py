"""What a task's file imports from beside it: each of two files gets its own `helpers`, in one process, too.

The folder of the file that was read last is the first of the search path, as `python path.py` would have it, and its modules are
the ones that go by their names: for pickles, for processes that load data, and for imports inside of its functions.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType

_entered: list[str] = []
"""The folder that stands in the search path for the file that was read last."""
_aside: dict[str, dict[str, ModuleType]] = {}
"""The modules of every other folder, by their names; they come back with a file of that folder."""

_NOT_BY_NAME = ("__main__", "__mp_main__", "paceline")
"""What no file of a task imports from beside it."""


@contextmanager
def beside(folder: Path) -> Iterator[None]:
    """Read a file of a folder in the block; where another folder has modules of the same names, those are out of its way."""
    here = str(folder.resolve())
    _enter(here)
    away = {
        name: module
        for name, (module, home) in _own_modules().items()
        if home != here and _has(here, name.partition(".")[0])
    }
    for name in away:
        del sys.modules[name]
    try:
        yield
    finally:
        # The search path still leads to these: they are the script's, which goes on with them.
        sys.modules.update(away)


def _enter(here: str) -> None:
    """Put a folder first in the search path, in place of the one before, and its modules in place of that one's."""
    for before in _entered:
        if before in sys.path:
            sys.path.remove(before)
    searched = {_real(one) for one in sys.path}
    left = [before for before in _entered if before != here and before not in searched]
    _entered[:] = [here]
    sys.path.insert(0, here)
    for name, (module, home) in _own_modules().items() if left else ():
        if home in left:
            _aside.setdefault(home, {})[name] = sys.modules.pop(name, module)
    sys.modules.update(_aside.pop(here, {}))


def _own_modules() -> Mapping[str, tuple[ModuleType, str]]:
    """Return the modules that no library has, by name, each with the folder in which its name is found."""
    loaded = list(sys.modules.items())
    homes = {
        name: _home(module)
        for name, module in loaded
        if "." not in name and name not in sys.stdlib_module_names and name not in _NOT_BY_NAME
    }
    own = {name: home for name, home in homes.items() if home and not home.startswith(_libraries())}
    return {name: (module, own[top]) for name, module in loaded if (top := name.partition(".")[0]) in own}


def is_own(module: ModuleType | None) -> bool:
    """Return whether a module is the user's: it lies in a file, and in no library."""
    if module is None or _name(module).partition(".")[0] == "paceline":
        return False
    home = _home(module)
    return bool(home) and not home.startswith(_libraries())


def _name(module: ModuleType) -> str:
    name = getattr(module, "__dict__", {}).get("__name__", "paceline")
    return name if isinstance(name, str) else "paceline"


def _home(module: ModuleType) -> str:
    """Return the folder that is searched for a module to be found; empty for what lies in none."""
    held = getattr(module, "__dict__", {})  # asked itself, a module that loads late may import much, or raise
    found, parts = held.get("__file__"), held.get("__path__")
    try:
        found = found if parts is None else next(iter(parts), None)
        return _real(str(Path(found).parent)) if isinstance(found, str) else ""
    except Exception:  # noqa: BLE001  (what stands there may be anything)
        return ""


def _real(folder: str) -> str:
    """Return a folder without links; most modules share a few."""
    return _links_followed(str(Path.cwd() / folder))


@cache
def _links_followed(folder: str) -> str:
    return str(Path(folder).resolve())


@cache
def _libraries() -> tuple[str, ...]:
    """Return where Python's own modules and those that are installed lie."""
    kinds = ("stdlib", "platstdlib", "purelib", "platlib")
    found = {sysconfig.get_path(kind) for kind in kinds} | {str(Path(os.__file__).parent)}
    return tuple(str(Path(one).resolve()) for one in sorted(found))


def _has(folder: str, name: str) -> bool:
    """Return whether a module is found in a folder by its name."""
    return Path(folder, f"{name}.py").is_file() or Path(folder, name).is_dir()
