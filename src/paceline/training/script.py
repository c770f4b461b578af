"""A worker's way into the user's script: it runs as far as its first call of `launch`, `train`, `resume` or `verify`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from paceline.world import standard_streams

MAIN = "__main__"
MAIN_ALIAS = "__mp_main__"
"""The name under which a worker imports the user's script, as multiprocessing does: `if __name__ == "__main__"` stays quiet."""

READ = "__paceline_read__"
"""By which a module is known that was read from a file, and as of when."""

_importing = False


class ReachedLaunch(BaseException):
    """The user's script, imported by a worker, has come to its own call of `launch`: all above it is defined."""


def check_importing() -> None:
    """Leave the user's script where a worker imports it: every call that starts workers begins with this."""
    if _importing:
        raise ReachedLaunch
    standard_streams.fill()


@contextmanager
def importing() -> Iterator[None]:
    """Run the user's script in the block, as far as a call that starts workers."""
    global _importing  # noqa: PLW0603  (read by launch, in this process, while the script runs)
    before, _importing = _importing, True
    try:
        yield
    except ReachedLaunch:
        pass  # no `if __name__ == "__main__"` is needed around it
    finally:
        _importing = before


def import_script(path: str) -> ModuleType:
    """Import the user's script under its alias, as far as its call of `launch`, once in a worker's life."""
    there = _of_file(sys.modules.get(MAIN_ALIAS), path) or started_here(path)
    if there is not None:
        sys.modules[MAIN] = there  # where the process was the script's own again in between
        return there
    module = ModuleType(MAIN_ALIAS)
    sys.modules[MAIN_ALIAS] = module
    with importing():
        execute(path, module)
    return module


def started_here(path: str) -> ModuleType | None:
    """Return the main module where this process runs a file as its script: one that joins a world has its own values in it."""
    main = sys.modules.get(MAIN)
    return _of_file(main, path) if main is not None and main.__name__ == MAIN else None


def _of_file(module: ModuleType | None, path: str) -> ModuleType | None:
    file = getattr(module, "__file__", None)
    return module if file is not None and Path(file).resolve() == Path(path).resolve() else None


def name_across(name: str) -> str:
    """Return the name of a module in the process that launches: a worker has the script under another."""
    is_script = name == MAIN_ALIAS or READ in getattr(sys.modules.get(name), "__dict__", {})
    return MAIN if is_script else name


@contextmanager
def main_preserved() -> Iterator[None]:
    """Put back afterwards which module is the main one, and where modules are looked for."""
    main, search_path = sys.modules[MAIN], list(sys.path)
    try:
        yield
    finally:
        sys.modules[MAIN] = main
        sys.path[:] = search_path


def execute(path: str, module: ModuleType) -> None:
    """Run a file as the main module; unlike runpy's way, `sys.argv` stays and the module outlives the call."""
    module.__file__ = path
    sys.modules[MAIN] = module
    code = compile(Path(path).read_bytes(), path, "exec")
    exec(code, module.__dict__)  # noqa: S102  (the user's own script)


def script() -> str | None:
    """Return the script that this process runs; None where what is `__main__` lies in no file that workers could import.

    A notebook has none, nor has standard input; a prompt (`python -i script.py`, too) defines what its script does not.
    """
    path = getattr(sys.modules[MAIN], "__file__", None)
    if path is None or hasattr(sys, "ps1") or not Path(path).is_file():
        return None
    return str(Path(path).absolute())  # links stay: workers are to have the `__file__` that it has
