"""What a worker is to do: who it is, and what it runs. The launcher sends it to the worker as one pickle.

The pickle is made and read by processes of the same user over a private socket; nothing else is ever unpickled.
"""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import runpy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MethodType, ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from paceline.errors import InputError
from paceline.training import folder
from paceline.world.env import Identity

if TYPE_CHECKING:
    from paceline.launch.workers.context import Worker

MAIN_ALIAS = "__mp_main__"
"""The name under which a worker imports the user's script, as multiprocessing does: `if __name__ == "__main__"` stays quiet."""


_importing = False


class ReachedLaunch(BaseException):
    """The user's script, imported by a worker, has come to its own call of `launch`: all above it is defined."""


def importing() -> bool:
    """Return whether a worker is importing the user's script right now."""
    return _importing


def _import_script(path: str) -> ModuleType:
    """Import the user's script under its alias, as far as its call of `launch`, once in a worker's life."""
    there = sys.modules.get(MAIN_ALIAS)
    if there is not None and there.__file__ == path:
        return there
    global _importing  # noqa: PLW0603  (read by launch, in this process, while the script runs)
    module = ModuleType(MAIN_ALIAS)
    sys.modules[MAIN_ALIAS] = module
    _importing = True
    try:
        _execute(path, module)
    except ReachedLaunch:
        pass  # no `if __name__ == "__main__"` is needed around it
    finally:
        _importing = False
    return module


def _execute(path: str, module: ModuleType) -> None:
    """Run a file as the main module; unlike runpy's way, `sys.argv` stays and the module outlives the call."""
    module.__file__ = path
    sys.modules["__main__"] = module
    code = compile(Path(path).read_bytes(), path, "exec")
    exec(code, module.__dict__)  # noqa: S102  (the user's own script)


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
    arguments: list[str] = field(default_factory=list)
    shared: Mapping[str, str] = field(default_factory=dict)
    """What of the environment workers on other machines are to have, too."""
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
    payload: bytes
    """Pickled (bound, args, kwargs), unpickled after the user's module is imported; what is bound comes before the run."""
    options: Mapping[str, Any]
    """Keyword arguments of `RunOptions`."""

    def __call__(self, worker: Worker) -> Any:
        """Import the function, make the `Run`, and call it."""
        from paceline.launch.workers.context import open_run

        with folder.kept(self.options.get("out")):
            function = self.resolve()
        bound, args, kwargs = self.arguments()
        with open_run(worker, self.options) as run:
            return function(*bound, run, *args, **kwargs)

    def arguments(self) -> tuple[tuple[Any, ...], tuple[Any, ...], dict[str, Any]]:
        """Return the arguments in front of the run, those after it, and those by name; `resolve` comes first."""
        return pickle.loads(self.payload)  # type: ignore[no-any-return]  # noqa: S301  (made by this user's own launcher)

    def resumed(self) -> FunctionCall:
        """Return the same call, going on from the last checkpoint."""
        return replace(self, options={**self.options, "resume": True})

    def resolve(self) -> Callable[..., Any]:
        """Return the function itself, importing the user's script under an alias when it is defined there."""
        value: Any = (
            _import_script(self.main_path) if self.main_path else importlib.import_module(self.module)
        )
        for part in self.name.split("."):
            value = getattr(value, part, None)
        if value is None:
            where = self.main_path or self.module
            raise InputError(
                f"{where} has no {self.name} above its first call of paceline.launch, and a worker reads it only that far. "
                "Define the function above that call."
            )
        return value  # type: ignore[no-any-return]


def function_call(
    function: Callable[..., Any] | str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Mapping[str, Any],
) -> FunctionCall:
    """Describe a call so that another process can make it; a text names a function as `module:name`."""
    bound: tuple[Any, ...] = ()
    if isinstance(function, str):
        module, _, name = function.partition(":")
        main_path = None
    else:
        function, bound, kwargs = _unbound(function, kwargs)
        module, name, main_path = _address(function)
    try:
        payload = pickle.dumps((bound, args, kwargs))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        which = _unsendable(bound, args, kwargs)
        raise InputError(
            f"{which} of {name} cannot be sent to another process: {error}. Give what can be pickled (no lambda, no function "
            f"that is defined inside another, no open file), or make it inside {name}."
        ) from error
    return FunctionCall(module=module, name=name, main_path=main_path, payload=payload, options=dict(options))


def _unsendable(bound: tuple[Any, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Return which argument it is that cannot be pickled."""
    named = {f"argument {place + 1}": value for place, value in enumerate((*bound, *args))}
    for which, value in {
        **named,
        **{f"the argument {name}=": value for name, value in kwargs.items()},
    }.items():
        try:
            pickle.dumps(value)
        except (pickle.PicklingError, TypeError, AttributeError):
            return f"{which} ({getattr(value, '__qualname__', type(value).__name__)})"
    return "what is given"


def is_in_script(function: Callable[..., Any]) -> bool:
    """Return whether workers import the script that was started to find a function."""
    return getattr(_unbound(function, {})[0], "__module__", None) == "__main__"


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
    if module not in ("__main__", MAIN_ALIAS):
        return module, name, None
    script = getattr(sys.modules["__main__"], "__file__", None)
    if script is None or not Path(script).is_file():
        source = "an interactive session" if script is None else f"a script that is no file ({script})"
        raise InputError(f"{name} is defined in {source}, which workers cannot import. Put it in a file.")
    return module, name, str(Path(script).resolve())


@dataclass(frozen=True, kw_only=True)
class ScriptCall:
    """Run a script or a module as `__main__`, as torchrun does."""

    target: str
    is_module: bool = False

    def __call__(self, worker: Worker) -> None:  # noqa: ARG002  (a script finds the world by itself)
        """Run it; the job has set `sys.argv`, the environment and the working directory."""
        if self.is_module:
            sys.path.insert(0, str(Path.cwd()))
            _check_module(self.target)
            runpy.run_module(self.target, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(self.target).parent))
            _execute(self.target, ModuleType("__main__"))


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
