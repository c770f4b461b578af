"""What a worker is to do: who it is, and what it runs. The launcher sends it to the worker as one pickle.

The pickle is made and read by processes of the same user over a private socket; nothing else is ever unpickled.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import runpy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MethodType, ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from paceline.errors import InputError
from paceline.launch.workers.program import become
from paceline.training import by_value, folder, launcher_values
from paceline.training.by_value import FAILS, Payload
from paceline.training.launcher_values import LauncherValues
from paceline.training.script import MAIN, MAIN_ALIAS, execute, import_script, script
from paceline.training.task_folder import Neighbours
from paceline.world.env import Identity

if TYPE_CHECKING:
    from paceline.launch.workers.context import Worker


class Call(Protocol):
    """Something a worker can run."""

    def __call__(self, worker: Worker) -> Any:
        """Run it and return the value that goes back to the launcher."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One worker's whole assignment."""

    identity: Identity
    call: Call
    threads: int
    """Threads torch may use in this worker."""
    environment: Mapping[str, str]
    """The launcher's environment; a warm fork server may have been started under another one."""
    folder: str
    """The working directory."""
    search_path: list[str]
    neighbours: Neighbours = field(default_factory=Neighbours)
    """The modules beside a task's file that the launcher has by name."""
    arguments: list[str] = field(default_factory=list)
    shared: Mapping[str, str] = field(default_factory=dict)
    """What of the environment workers on other machines are to have, too."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """What a script is told in place of what the identity says."""
    newcomer: bool = False
    """Whether this worker is to join a run that is in progress."""
    modules: tuple[str, ...] = ()
    """What the fork server is to have imported."""
    starts: int = 0
    """How often all workers of this launch were started over."""


@dataclass(frozen=True, kw_only=True)
class FunctionCall:
    """Call a function of the user as `function(run, *args, **kwargs)`; it is found by its name in its module."""

    module: str
    name: str
    main_path: str | None
    """The script the function lives in, when its module is `__main__`."""
    payload: Payload
    """(bound, args, kwargs), opened after the user's module is imported; what is bound comes before the run."""
    options: Mapping[str, Any]
    """Keyword arguments of `RunOptions`."""
    launcher: LauncherValues = field(default_factory=LauncherValues, repr=False)
    """What the launching process has by name, where workers import the function anew."""

    def __call__(self, worker: Worker) -> Any:
        """Import the function, make the `Run`, and call it."""
        from paceline.launch.workers.context import open_run

        notes: list[str] = []
        with folder.kept(self.options.get("out")):
            function = self.resolve(notes.append)
        bound, args, kwargs = self.arguments()
        with open_run(worker, self.options, notes) as run:
            return function(*bound, run, *args, **kwargs)

    def arguments(self) -> tuple[tuple[Any, ...], tuple[Any, ...], dict[str, Any]]:
        """Return the arguments in front of the run, those after it, and those by name; `resolve` comes first."""
        return self.payload.open()  # type: ignore[no-any-return]

    def resumed(self) -> FunctionCall:
        """Return the same call, going on from the last checkpoint."""
        return replace(self, options={**self.options, "resume": True})

    def resolve(self, note: Callable[[str], None]) -> Callable[..., Any]:
        """Return the function itself, importing the user's script under an alias when it is defined there.

        `note` hears what the user is to know of values that differ here.
        """
        value: Any = import_script(self.main_path) if self.main_path else importlib.import_module(self.module)
        for part in self.name.split("."):
            value = getattr(value, part, None)
        if value is None:
            where = self.main_path or self.module
            raise InputError(
                f"{where} has no {self.name} above its first call of paceline.launch, and a worker reads it only that far, "
                'without what stands under `if __name__ == "__main__":`. Define the function above that call.'
            )
        for text in self.launcher.check():
            note(text)
        return value  # type: ignore[no-any-return]


def function_call(
    function: Callable[..., Any] | str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Mapping[str, Any],
) -> FunctionCall:
    """Describe a call so that another process can make it; a text names a function as `module:name`."""
    bound: tuple[Any, ...] = ()
    values, main_path = LauncherValues(), None
    if isinstance(function, str):
        module, _, name = function.partition(":")
        payload = _packed(name, bound, args, kwargs)
    else:
        function, bound, kwargs = _unbound(function, kwargs)
        values = launcher_values.of_function(function, *bound, *args, *kwargs.values())
        if _has_no_file(function):  # it goes with its code
            _ = by_value.packed(function, function.__qualname__)  # which says what in it cannot be sent
            payload = _packed(function.__qualname__, (function, *bound), args, kwargs)
            module, name = __name__, call_sent.__name__
        else:
            module, name, main_path = _address(function)
            payload = _packed(name, bound, args, kwargs)
    return FunctionCall(
        module=module,
        name=name,
        main_path=main_path,
        payload=payload,
        options=dict(options),
        launcher=values,
    )


def call_sent(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function that came as a value: in a worker it is the first of the arguments."""
    return function(*args, **kwargs)


def _has_no_file(function: Callable[..., Any]) -> bool:
    """Return whether a function is of the main module, and that is no file: of a cell, a prompt or standard input."""
    return getattr(function, "__module__", None) == MAIN and script() is None and inspect.isroutine(function)


def _packed(name: str, bound: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Payload:
    """Return what a function is called with, packed; refuse what cannot be sent, by which argument it is."""
    try:
        return by_value.pack((bound, args, kwargs))
    except FAILS as error:
        which = _unsendable(bound, args, kwargs)
        raise InputError(
            f"{which} of {name} cannot be sent to another process: {error}. Give what can be pickled (no lambda, no function "
            f"that is defined inside another, no open file), or make it inside {name}."
        ) from error


def _unsendable(bound: tuple[Any, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Return which argument it is that cannot be pickled."""
    named = {f"argument {place + 1}": value for place, value in enumerate((*bound, *args))}
    for which, value in {
        **named,
        **{f"the argument {name}=": value for name, value in kwargs.items()},
    }.items():
        if not by_value.travels(value):
            return f"{which} ({getattr(value, '__qualname__', type(value).__name__)})"
    return "what is given"


def is_in_script(function: Callable[..., Any]) -> bool:
    """Return whether workers import the script that was started to find a function."""
    return getattr(_unbound(function, {})[0], "__module__", None) == MAIN and script() is not None


def name_of(function: Callable[..., Any] | str) -> str:
    """Return the name of a function, the same on every machine."""
    return (
        function
        if isinstance(function, str)
        else getattr(_unbound(function, {})[0], "__qualname__", str(function))
    )


def _unbound(
    function: Callable[..., Any], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return the function behind functools.partial or a method of an object, the arguments bound in front, and all keywords."""
    if isinstance(function, partial):
        inner, bound, keywords = _unbound(function.func, {**function.keywords, **kwargs})
        return inner, (*bound, *function.args), keywords
    if isinstance(function, MethodType) and not isinstance(function.__self__, type):
        return function.__func__, (function.__self__,), kwargs
    return function, (), kwargs


def _address(function: Callable[..., Any]) -> tuple[str, str, str | None]:
    """Return where another process finds a function: module, name, and the script when that is the module."""
    name = getattr(function, "__qualname__", "")
    module = getattr(function, "__module__", None)
    if not name:
        raise InputError(
            f"a {type(function).__name__} cannot be run in another process: it is an object, and workers find a function by its "
            "name. Give a function that is defined at the top of its module."
        )
    if module is None or "<" in name:
        raise InputError(
            f"{name} cannot be run in another process: it is defined inside a function or is a lambda. "
            "Define it at the top of its module."
        )
    if module not in (MAIN, MAIN_ALIAS):
        return module, name, None
    return module, name, script()


@dataclass(frozen=True, kw_only=True)
class ScriptCall:
    """Run a script or a module as `__main__`, or a program in place of this process, as torchrun does."""

    target: str
    is_module: bool = False
    is_program: bool = False

    def __call__(self, worker: Worker) -> None:  # noqa: ARG002  (a script finds the world by itself)
        """Run it; the job has set `sys.argv`, the environment and the working directory."""
        if self.is_program:
            become(sys.argv)
        elif self.is_module:
            sys.path.insert(0, str(Path.cwd()))
            _check_module(self.target)
            runpy.run_module(self.target, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(self.target).parent))
            execute(self.target, ModuleType(MAIN))


def _check_module(name: str) -> None:
    """Raise InputError for a module that does not exist; one that fails to import is the user's code."""
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(f"{error.name}."):
            raise
        found = None
    if found is None:
        raise InputError(f"there is no module {name!r}. Without -m it would be taken for a file.")
