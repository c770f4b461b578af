"""Finds the user's Task: `path.py:Class`, `package.module:Class`, or a file with one Task in it."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from paceline import ranges
from paceline.declared import Average, Best, EarlyStopping
from paceline.errors import InputError, UnknownNameError
from paceline.task import Task
from paceline.training.launcher_values import LauncherValues
from paceline.training.options import PRECISIONS
from paceline.training.script import READ, importing, started_here
from paceline.training.spec import TrainSpec
from paceline.training.task_folder import beside, hidden_helper

LARGEST = 2**63 - 1
_DECLARED: Mapping[str, type] = {"early_stopping": EarlyStopping, "keep_best": Best, "average": Average}
_METHODS = tuple(name for name, value in vars(Task).items() if inspect.isfunction(value) and name[0] != "_")


def load_task(
    reference: str,
    settings: Mapping[str, str],
    launcher: LauncherValues | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> Task:
    """Make the task; `settings` are its constructor's arguments as text; `launcher` is what the launching process has."""
    place, _, name = reference.rpartition(":") if ":" in reference else (reference, "", "")
    module = _from_file(Path(place)) if place.endswith(".py") else _from_package(place)
    if launcher is not None and launcher.remedy and getattr(module, name, None) is None:
        raise InputError(
            f"{place} has no {name} where workers read it: they run it as far as the first call of paceline in it, and nothing "
            f'that stands under `if __name__ == "__main__":`. Define {name} above.'
        )
    kind = _choose(module, name, place)
    for text in () if launcher is None else launcher.check(module):
        note(text)
    task = kind(**arguments(kind, settings))
    check_task(task)
    return task


_opened: dict[bytes, type[Task]] = {}
"""The classes that were sent to this process: each is one class, however often its task is made."""


def make_task(spec: TrainSpec, note: Callable[[str], None] = lambda _: None) -> Task:
    """Make the task of a training, from where it is found or from what was sent; `note` hears what the user is to know."""
    if spec.shipped is None:
        return load_task(spec.task, spec.settings, spec.launcher, note)
    found = _opened.get(spec.shipped.content) or spec.shipped.open()
    for text in spec.launcher.check():
        note(text)
    if isinstance(found, type):
        _opened[spec.shipped.content] = found
    task: Task = found if isinstance(found, Task) else found(**arguments(found, spec.settings))
    check_task(task)
    return task


def check_task(task: Task) -> None:
    """Raise InputError where an attribute of a task is outside its range; numbers of numpy become Python's own."""
    for name, within in ranges.TASK.items():
        value = getattr(task, name)
        if value is not None or getattr(Task, name) is not None:
            read = within.read(f"{type(task).__name__}.{name}", value)
            if read is not value:
                setattr(task, name, read)
    for name, kind in _DECLARED.items():
        value = getattr(task, name)
        if value is not None and not isinstance(value, kind):
            raise InputError(
                f"{type(task).__name__}.{name} is {value!r:.60}, but must be a paceline.{kind.__name__}."
            )
    for name in _METHODS:
        if not callable(getattr(task, name)):
            raise InputError(
                f"{type(task).__name__}.{name} is {getattr(task, name)!r:.60}, but must be a method."
            )
    if task.precision not in PRECISIONS:
        raise UnknownNameError(f"precision of {type(task).__name__}", str(task.precision), PRECISIONS)


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise InputError(f"there is no file {path}. Give the path of a Python file: path.py:Class.")
    if (here := started_here(str(path))) is not None:
        return here  # this process has joined a world: what it has set itself counts
    with beside(path.resolve().parent):
        try:
            module = _read(path)
        except (ImportError, AttributeError) as error:
            hidden = hidden_helper(error, path.resolve().parent)
            if hidden is None:
                raise
            raise InputError(
                f"{hidden} cannot be imported by its name: Python's own module {hidden.stem} is loaded already, and goes by it "
                f"({error}). Rename the file."
            ) from error
    sys.modules[path.stem] = module
    return module


def _read(path: Path) -> ModuleType:
    """Return the module of a file, which is read once as long as it stays what it is."""
    name = path.stem
    # A process may make its task twice, and what a module registers with torch it can register only once.
    there, state = sys.modules.get(name), _state_of(path)
    if there is not None and getattr(there, READ, None) == state:
        return there
    spec = importlib.util.spec_from_file_location(name, path.absolute())
    if spec is None or spec.loader is None:
        raise InputError(f"{path} cannot be imported as Python.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    vars(module)[READ] = state
    with importing():
        spec.loader.exec_module(module)
    return module


def _state_of(path: Path) -> tuple[str, int, int]:
    """Return which file it is, and as of when."""
    found = path.stat()
    return str(path.resolve()), found.st_mtime_ns, found.st_size


def _from_package(name: str) -> ModuleType:
    if not name or name.startswith("."):  # to Python it is relative, to nothing
        raise InputError(f"{name!r} is no name of a module. Give path.py:Class or package.module:Class.")
    # The folder one is in, as `python -m name` would have it.
    if sys.path[:1] != [str(Path.cwd())]:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise InputError(
                f"there is no module {name!r}. Give path.py:Class or package.module:Class."
            ) from None
        raise


def _choose(module: ModuleType, name: str, place: str) -> type[Task]:
    tasks = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, Task) and value.__module__ == module.__name__
    }
    if not name:
        if len(tasks) != 1:
            raise InputError(
                f"{place} holds {len(tasks)} tasks ({', '.join(tasks) or 'none'}). Say which one: {place}:Class."
            )
        return next(iter(tasks.values()))
    kind = getattr(module, name, None)
    if kind is None:
        raise UnknownNameError(f"class in {place}:", name, tasks or ["(no Task is defined there)"])
    if not (isinstance(kind, type) and issubclass(kind, Task)):
        raise InputError(
            f"{place}:{name} is a {type(kind).__name__}, not a paceline.Task. Write class {name}(paceline.Task)."
        )
    return kind


def arguments(kind: type[Task], settings: Mapping[str, str]) -> dict[str, Any]:
    """Read `--set key=value` texts as the types that the constructor's arguments have."""
    known = _parameters(kind)
    made = {name: read_setting(kind, name, text) for name, text in settings.items()}
    missing = [
        name for name, parameter in known.items() if parameter.default is parameter.empty and name not in made
    ]
    if missing:
        raise InputError(f"{kind.__name__} needs {', '.join(missing)}. Give --set {missing[0]}=VALUE.")
    return made


def read_setting(kind: type[Task], name: str, text: str) -> Any:
    """Read one of these texts."""
    known = _parameters(kind)
    if name not in known:
        raise UnknownNameError(f"option of {kind.__name__}", name, known or ["(it takes none)"])
    return _value(kind.__name__, name, text, known[name])


def _parameters(kind: type[Task]) -> dict[str, inspect.Parameter]:
    """Return what can be given to a task's constructor by name."""
    return {
        name: parameter
        for name, parameter in inspect.signature(kind).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }


def _value(task: str, name: str, text: str, parameter: inspect.Parameter) -> Any:
    try:
        value = ast.literal_eval({"true": "True", "false": "False", "none": "None"}.get(text.lower(), text))
    except (ValueError, SyntaxError, TypeError):  # TypeError: what looks like a literal and is none, {[1]}
        value = text
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"--set {name}={text}: {value} is no number to train with. Give a finite one.")
    if isinstance(value, int) and abs(value) > LARGEST:
        raise InputError(f"--set {name}={text[:40]}: no tensor holds so large a number. Give one below 2^63.")
    default = parameter.default
    if default is parameter.empty or default is None:
        return value
    if isinstance(default, str):
        return text
    if isinstance(default, float) and type(value) is int:
        return float(value)
    # To Python True is an int too.
    if not isinstance(value, type(default)) or isinstance(value, bool) != isinstance(default, bool):
        raise InputError(f"--set {name}={text}: {task} wants a {type(default).__name__} like {default!r}.")
    return value
