"""Code that lies in no file which workers could import (cells of a notebook, a prompt, standard input) travels as a value.

What is defined in a module or in the script itself travels by its name, as ever. A payload is made once for a launch, so every
worker, and whoever replaces one, makes the same of it. It goes where the job of a worker goes, into no file, and nothing that was
not made by this user's own launcher is ever opened.
"""

from __future__ import annotations

import hashlib
import io
import linecache
import pickle
import sys
from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from paceline.compat import pickles
from paceline.compat.code_names import names_in
from paceline.errors import InputError
from paceline.training.script import MAIN, import_script, script
from paceline.training.wrapped_functions import REDUCERS, is_dispatching, take_apart_dispatching

FAILS = (pickle.PicklingError, TypeError, AttributeError, RecursionError)
"""What is raised for a value that cannot be pickled."""
_DEEPEST = 6
"""How far to look for what it is that cannot travel."""
_REMEDY = (
    "An open file, a lock, a generator and a tensor on a GPU stay in the process that has them: make them inside, where they are "
    "used."
)


@dataclass(frozen=True)
class Payload:
    """A value on its way to the workers."""

    content: bytes = field(repr=False)
    script: str | None = None
    """The script to import first, where the value names what is in it."""
    sources: Mapping[str, tuple[str, ...]] = field(default_factory=dict, repr=False)
    """The lines of code that has no file, for tracebacks, by the name that stands for the file."""

    def open(self) -> Any:
        """Return the value, with the code that it came with."""
        if self.script is not None:
            import_script(self.script)
        for name, lines in self.sources.items():
            # Without a time, so that nobody looks for the file.
            linecache.cache[name] = (sum(map(len, lines)), None, list(lines), name)
        reader = pickle.Unpickler(io.BytesIO(self.content))  # noqa: S301  (made by this user's own launcher)
        value, classes = reader.load(), reader.load()
        _install(classes)
        return value

    @property
    def fingerprint(self) -> str:
        """One number for the code that came along; machines of a run compare it."""
        texts = sorted("".join(lines) for lines in self.sources.values())
        return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]


def pack(value: Any) -> Payload:
    """Return a value as workers can open it: what lies in a file by its name, else the code itself.

    Raise one of FAILS where it cannot travel.
    """
    target, path = io.BytesIO(), script()
    if path is not None:
        plain = pickles.pickler(target)
        plain.dump(value)
        plain.dump({})
        return Payload(target.getvalue(), script=path if _names_script(target.getvalue()) else None)
    pickler = _pickler()(target)
    pickler.dump(value)
    pickler.dump(dict(pickler.classes))
    return Payload(target.getvalue(), sources=_sources(pickler.files))


def _names_script(content: bytes) -> bool:
    """Return whether a pickle names something of the script; a text that reads like its name costs an import and no more."""
    return MAIN.encode() in content


def packed(value: Any, name: str) -> Payload:
    """Return it packed; raise InputError with what it is that cannot travel."""
    try:
        return pack(value)
    except FAILS as error:
        raise InputError(reason(value, name, error)) from error


def reason(value: Any, name: str, error: Exception) -> str:
    """Return why a value cannot travel: which part of it does not, and what to do."""
    found = _culprit(value, name, _DEEPEST, set())
    if found is not None and found[2]:
        part, owner, _ = found
        return (
            f"{owner} has {part}, which cannot be sent to another process: workers find a function by its name, and it has "
            "none at the top of a file. Define it there, with def."
        )
    if found is None:
        return f"{name} cannot be sent to another process ({error}). {_REMEDY}"
    part, owner, _ = found
    return f"{owner} uses {part}, which cannot be sent to another process ({error}). {_REMEDY}"


def _culprit(value: Any, name: str, depth: int, seen: set[int]) -> tuple[str, str, bool] | None:
    """Return the innermost part that cannot be packed, whose it is, and whether that is a function or class without a name."""
    seen.add(id(value))
    for part, one in _parts(value) if depth else ():
        if id(one) in seen or travels(one):
            continue
        below = f"{name}.{part}" if isinstance(value, type) else part
        nameless = _goes_by_name(one)
        if nameless and getattr(one, "__name__", "") == "<lambda>":
            return f"{part} (a lambda)", name, True
        found = None if nameless else _culprit(one, below, depth - 1, seen)
        return found or (f"{part} (a {type(one).__name__})", name, nameless)
    return None


def travels(value: Any) -> bool:
    """Return whether a value can be packed."""
    try:
        pack(value)
    except Exception:  # noqa: BLE001  (whatever it raises, it does not)
        return False
    return True


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a value is made of, by name."""
    value = getattr(value, "__func__", value)
    if isinstance(value, FunctionType):
        names = names_in(value.__code__)
        yield from ((name, one) for name, one in value.__globals__.items() if name in names)
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            yield name, cell.cell_contents
    elif isinstance(value, Mapping):
        yield from ((str(name), one) for name, one in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"item {place}", one) for place, one in enumerate(value))
    elif not isinstance(value, ModuleType):
        yield from ((name, one) for name, one in getattr(value, "__dict__", {}).items() if name != "__dict__")


def _goes_by_name(value: Any) -> bool:
    """Return whether a function or a class of a file goes by its name alone: what is in it has no part in that."""
    return script() is not None and isinstance(getattr(value, "__func__", value), FunctionType | type)


@cache
def _pickler() -> Any:
    """Return the class of picklers that send code; it is loaded where there is such code."""
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
        """Sends functions and classes of the main module by value, and notes which."""

        def __init__(self, file: Any) -> None:
            others = ChainMap(REDUCERS, cloudpickle.Pickler.dispatch_table)  # type: ignore[arg-type]  # not written to
            self.dispatch_table = pickles.reducers(others)  # read as it is made
            super().__init__(file)
            self.classes: dict[str, type] = {}
            self.files: set[str] = set()

        def reducer_override(self, obj: Any) -> Any:
            """Note what is of the main module; refuse what cloudpickle would copy without being asked."""
            if isinstance(obj, io.IOBase) and obj not in (sys.stdout, sys.stderr):
                raise pickle.PicklingError(f"an open file, {getattr(obj, 'name', type(obj).__name__)!r}")
            torch = sys.modules.get("torch")
            if torch is not None and isinstance(obj, torch.Tensor) and obj.device.type not in ("cpu", "meta"):
                raise pickle.PicklingError(f"a tensor on {obj.device}")
            if isinstance(obj, type):
                kind: type = obj
                if vars(sys.modules[MAIN]).get(kind.__qualname__) is kind:
                    self.classes[kind.__qualname__] = kind
            if isinstance(obj, FunctionType):
                if is_dispatching(obj):
                    return take_apart_dispatching(obj)
                self.files.add(obj.__code__.co_filename)
            return super().reducer_override(obj)

    return Pickler


def _sources(files: set[str]) -> dict[str, tuple[str, ...]]:
    """Return the lines of what has no file, as far as this process has them."""
    return {
        name: tuple(linecache.cache[name][2])  # type: ignore[misc]  # whole entries: nobody loads lazily for such names
        for name in sorted(files)
        if len(linecache.cache.get(name, ())) > 1 and not Path(name).exists()
    }


def _install(classes: Mapping[str, type]) -> None:
    """Make the main module of this process hold the classes that came: by their names they find their way back."""
    held = vars(sys.modules[MAIN])
    if all(held.get(name) is kind for name, kind in classes.items()):
        return
    module = ModuleType(MAIN)
    vars(module).update(classes)
    sys.modules[MAIN] = module
