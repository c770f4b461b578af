"""What stands for a task in a call: a class, an instance or text; and how workers come to it. Text alone imports no torch."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paceline.errors import InputError
from paceline.tasks.names import resolve
from paceline.training import by_value, launcher_values
from paceline.training.by_value import Payload
from paceline.training.launcher_values import LauncherValues
from paceline.training.script import MAIN, script

if TYPE_CHECKING:
    from paceline.task import Task

    AnyTask = type[Task] | Task | str
    AnyTaskOrNone = AnyTask | None
else:  # to name the class would load torch, which text alone does not need
    AnyTask = "type[Task] | Task | str"
    AnyTaskOrNone = "type[Task] | Task | str | None"


@dataclass(frozen=True)
class Source:
    """Where workers find a task."""

    reference: str
    """As the command line has it; empty where the task itself is sent."""
    name: str
    shipped: Payload | None = None
    in_script: bool = False
    """Whether workers import the script that was started, to find it."""
    launcher: LauncherValues = field(default_factory=LauncherValues, repr=False)
    """What this process has by name, where they import the task anew."""


def source_of(task: Any) -> Source:
    """Return where workers find a task; raise InputError where they cannot come to it."""
    if isinstance(task, str):
        return Source(*resolve(task))
    from paceline.task import Task

    kind = task if isinstance(task, type) else type(task)
    if not issubclass(kind, Task):
        raise InputError(
            f"task is {_shown(task)}, but must be a class or an instance of paceline.Task, or text: 'digits', 'file.py:Class' or "
            "'package.module:Class'. A loop of your own starts with paceline.launch."
        )
    name, module = kind.__name__, kind.__module__
    path = script() if module == MAIN else None
    sent = module == MAIN and path is None
    if "<" in kind.__qualname__ and not sent:
        raise InputError(
            f"{name} is defined inside a function of a file, where workers cannot find it. Define it at the top of the file."
        )
    values, here = launcher_values.of_task(task), path is not None
    if task is kind and not sent and kind.__qualname__ == name:
        return Source(f"{path or module}:{name}", name, in_script=here, launcher=values)
    return Source("", name, by_value.packed(task, name), in_script=here, launcher=values)


def texts_of(settings: Mapping[str, Any] | None, task: Any) -> dict[str, str]:
    """Return the arguments of a task's constructor as the command line would have them."""
    if settings is None:
        return {}
    if not isinstance(settings, Mapping):
        raise InputError(f"settings is {_shown(settings)}, but must be a mapping, such as {{'lr': 0.001}}.")
    if task is not None and not isinstance(task, str | type):
        raise InputError(
            "settings are arguments of a constructor, and the task is an object that is made already. Give them to "
            f"{type(task).__name__}()."
        )
    return {str(name): _text(str(name), value, task) for name, value in settings.items()}


def _text(name: str, value: Any, task: Any) -> str:
    """Return one value as text; raise InputError unless a worker will read just that value."""
    text = value if isinstance(value, str) else repr(value)
    if isinstance(task, type):
        from paceline.training.reference import read_setting

        read = read_setting(task, name, text)
    else:
        read = _literal(text)
    if not _same(read, value):
        raise InputError(
            f"settings={{{name!r}: {_shown(value)}}} would reach the workers as {_shown(read)}. Give a plain value of the type "
            "that the task takes, or an instance of the task that has it."
        )
    return text


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def _same(read: Any, value: Any) -> bool:
    """Return whether two plain values are one; a whole number may stand for a real one."""
    if type(read) is not type(value) and not (type(read) is float and type(value) is int):
        return False
    return bool(read == value) if isinstance(value, _PLAIN) else False


_PLAIN = (str, int, float, bool, type(None), list, tuple, dict)


def _shown(value: Any) -> str:
    """Return a value for a message; its type alone where it is long."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    text = repr(value)
    return text if len(text) <= 40 and "\n" not in text else f"a {type(value).__name__}"
