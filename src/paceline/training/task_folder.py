"""What a task's file imports from beside it: each of two files gets its own `helpers`, in one process, too.

The folder of the file that was read last is the first of the search path, as `python path.py` would have it, and its modules are
the ones that go by their names: for pickles, for processes that load data, and for imports inside of its functions.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from paceline.compat.libraries import is_library
from paceline.training.script import MAIN, name_across

_aside: dict[str, dict[str, ModuleType]] = {}
"""The modules of every other folder, by their names; they come back with a file of that folder."""
_left: list[str] = []
"""The folder whose file was read last; the search path may have been put back since."""
_finders: list[Finder] = []
"""What leads a worker to the modules of the folder that its launcher was in."""


class _Entered(str):
    """The entry of the search path that is such a folder: the script may have one of the same text."""

    __slots__ = ()


_NOT_BY_NAME = ("__main__", "__mp_main__", "paceline")
"""What no file of a task imports from beside it."""


@contextmanager
def beside(folder: Path) -> Iterator[None]:
    """Read a file of a folder in the block; where another folder has modules of the same names, those are out of its way."""
    here = str(folder.resolve())
    _enter(here)
    away = {
        name: module
        for name, (module, homes) in _own_modules().items()
        if here not in homes and _has(here, name.partition(".")[0])
    }
    for name in away:
        del sys.modules[name]
    finder = Finder(here, None)
    sys.meta_path.insert(_place_of_path(), finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        # The search path still leads to these: they are the script's, which goes on with them.
        sys.modules.update(away)


def _enter(here: str) -> None:
    """Put a folder first in the search path, in place of the one before, and its modules in place of that one's."""
    own = _own_modules()  # before the path changes: a package without __init__.py looks for itself along it
    sys.path[:] = search_path()
    searched = {_real(one) for one in sys.path}
    left = {before for before in _left if before != here and before not in searched}
    leaving = {name: (module, homes & left) for name, (module, homes) in own.items() if homes & left}
    for name, (module, homes) in leaving.items():
        for home in homes:
            _aside.setdefault(home, {})[name] = module
        del sys.modules[name]
        package, _, last = name.rpartition(".")
        stays = vars(sys.modules[package]) if package in sys.modules and package not in leaving else {}
        if stays.get(last) is module:
            del stays[last]
    sys.meta_path[:] = [one for one in sys.meta_path if one not in _finders]
    _finders.clear()
    _left[:] = [here]
    sys.path.insert(0, _Entered(here))
    _put_back(_aside.pop(here, {}))


def _put_back(modules: Mapping[str, ModuleType]) -> None:
    sys.modules.update(modules)
    for name, module in modules.items():
        package, _, last = name.rpartition(".")
        if package in sys.modules and package not in modules:
            vars(sys.modules[package])[last] = module


def _place_of_path() -> int:
    """Return where among the finders of modules the one of the search path stands."""
    return sys.meta_path.index(PathFinder) if PathFinder in sys.meta_path else len(sys.meta_path)


def search_path() -> list[str]:
    """Return where modules are looked for by all but a task's file."""
    return [one for one in sys.path if not isinstance(one, _Entered)]


@dataclass(frozen=True)
class Neighbours:
    """The modules of a task's folder that go by their names in one process, for another one to find the same."""

    folder: str = ""
    names: frozenset[str] = frozenset()

    @classmethod
    def here(cls) -> Neighbours:
        """Return those of this process."""
        entered = [one for one in sys.path if isinstance(one, _Entered)]
        if not entered:
            return cls()
        folder = str(entered[0])
        own = _own_modules()
        return cls(folder, frozenset(name for name, (_, homes) in own.items() if folder in homes))

    def adopt(self) -> None:
        """Have them found in this process, until a file of another folder is read: values that are sent here may name them."""
        if self.folder:
            _finders[:] = [Finder(self.folder, self.names), Finder(self.folder, None, last=True)]
            sys.meta_path[:] = [_finders[0], *sys.meta_path, _finders[1]]
            _left[:] = [self.folder]


@dataclass(frozen=True)
class Finder:
    """Looks for modules in one folder."""

    folder: str
    names: frozenset[str] | None
    """Which; without, any."""
    last: bool = False
    """Whether it is asked for what is found nowhere else."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return what to import a module by, as Python asks for it."""
        if self.names is not None and name not in self.names:
            return None
        if path is not None:  # a part of a package, of which another folder may have the rest
            parent = Path(self.folder, *name.split(".")[:-1])
            wanted = self.names is not None or self.last
            return PathFinder.find_spec(name, [str(parent)], target) if wanted else None
        here = PathFinder.find_spec(name, [self.folder], target)
        if here is None or here.loader is not None:
            return here
        # A folder: it may be a package without __init__.py, or hold data, and have the name of a package by chance.
        others = PathFinder.find_spec(name, search_path(), target)
        if others is None or others.loader is None:
            return PathFinder.find_spec(name, [self.folder, *search_path()], target)
        is_meant = any(Path(self.folder, name).glob("*.py"))
        return here if is_meant and not is_library(str(Path(str(others.origin)).parent)) else others


def _own_modules() -> Mapping[str, tuple[ModuleType, set[str]]]:
    """Return the modules that no library has, by name, each with the folders in which the first part of its name is found."""
    families: dict[str, dict[str, ModuleType]] = {}
    for name, module in list(sys.modules.items()):
        families.setdefault(name.partition(".")[0], {})[name] = module
    found: dict[str, tuple[ModuleType, set[str]]] = {}
    for top, family in families.items():
        if top not in family or top in _NOT_BY_NAME:
            continue
        homes = _homes(family) if _has_parts_alone(family[top]) else {top: _home(family[top])}
        own = {home for home in homes.values() if home and not is_library(home)}
        if own == set(homes.values()) and len(own) == 1:
            found |= {name: (module, own) for name, module in family.items()}
        else:  # a library, or another folder, has the rest of it
            found |= {name: (family[name], {home}) for name, home in homes.items() if home in own}
    return found


def _has_parts_alone(module: ModuleType) -> bool:
    """Return whether a module is a package without __init__.py."""
    return not isinstance(_attribute(module, "__file__"), str) and _attribute(module, "__path__") is not None


def _homes(family: Mapping[str, ModuleType]) -> Mapping[str, str]:
    """Return the folder of each part of a package without __init__.py; asked itself, it looks along the search path of now."""
    known = {
        name: _home(module, depth=name.count("."))
        for name, module in family.items()
        if isinstance(_attribute(module, "__file__"), str)
    }
    top = min(family, key=len)
    return known or {top: _home_of_path(family[top])}


def is_own(module: ModuleType | None) -> bool:
    """Return whether a module is the user's: it lies in a file, and in no library."""
    if module is None or str(_attribute(module, "__name__")).partition(".")[0] == "paceline":
        return False
    home = _home(module)
    return bool(home) and not is_library(home)


def is_users(name: str) -> bool:
    """Return whether a module is the user's by its name: the script, or one that lies in no library."""
    return name_across(name) == MAIN or is_own(sys.modules.get(name))


def _home(module: ModuleType, depth: int = 0) -> str:
    """Return the folder that is searched for a module, or for what it is `depth` levels inside; empty for what has no file."""
    file = _attribute(module, "__file__")
    if not isinstance(file, str):
        return "" if depth else _home_of_path(module)
    above = Path(file).parents
    levels = depth + (Path(file).stem == "__init__")
    return _real(str(above[min(levels, len(above) - 1)])) if above else ""


def _home_of_path(module: ModuleType) -> str:
    """Return the folder that is searched for a package; empty for what is none."""
    with suppress(Exception):  # a module may say anything of itself
        first = next(iter(_attribute(module, "__path__")))  # type: ignore[call-overload]
        return _real(str(Path(first).parent)) if isinstance(first, str) else ""
    return ""


def _attribute(module: object, name: str) -> object:
    """Return what a module holds by a name, without asking it: one that loads late would do so, or raise."""
    try:
        return object.__getattribute__(module, "__dict__").get(name)
    except Exception:  # noqa: BLE001  (what stands in sys.modules may be anything)
        return None


def _real(folder: str) -> str:
    """Return a folder without links; most modules share a few."""
    return _links_followed(str(Path.cwd() / folder))


@cache
def _links_followed(folder: str) -> str:
    return str(Path(folder).resolve())


def hidden_helper(error: ImportError | AttributeError, folder: Path) -> Path | None:
    """Return the file of a folder that was meant where Python's own module lacks a name; None where there is no such file."""
    name = error.name if isinstance(error, ImportError) else _attribute(error.obj, "__name__")
    module = sys.modules.get(name) if isinstance(name, str) else None
    if module is None or name not in sys.stdlib_module_names or is_own(module):
        return None
    if isinstance(error, AttributeError) and error.obj is not module:
        return None
    return next((one for one in (folder / f"{name}.py", folder / str(name)) if one.exists()), None)


def _has(folder: str, name: str) -> bool:
    """Return whether a module is found in a folder by its name."""
    return Path(folder, f"{name}.py").is_file() or Path(folder, name).is_dir()
