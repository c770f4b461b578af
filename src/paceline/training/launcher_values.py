"""Plain values that the launching process has changed where workers import the code anew, and would train with the old ones.

The launcher notes what a function or a task reads by name: globals of the user's modules, attributes of his classes, torch's
default type and device. A worker compares that with what it has imported, before anything runs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from paceline.errors import InputError
from paceline.training.code_walk import Walk
from paceline.training.plain_values import ABSENT, Word, plain, plain_attribute, same, shown
from paceline.training.script import MAIN, MAIN_ALIAS
from paceline.training.source_values import Reached, is_fixed, is_written

_NAME, _VALUE = "<name>", "<value>"
"""Where a remedy says them."""


@dataclass(frozen=True)
class Named:
    """A plain value that workers find by a name."""

    module: str
    owner: str
    """The class that has it as an attribute; empty for a global of the module."""
    name: str
    value: Any
    changed: bool
    """Whether it was another when this process first launched something that reads it."""


@dataclass(frozen=True)
class LauncherValues:
    """What the launching process has, for a worker to compare."""

    named: tuple[Named, ...] = field(default=(), repr=False)
    reached: Reached = field(default=frozenset(), repr=False)
    torch: tuple[tuple[str, str], ...] = ()
    remedy: str = ""

    def check(self, main: ModuleType | None = None) -> None:
        """Raise InputError where this worker has imported another value than the launcher has; `main` is the script here."""
        for name, value in self.torch:
            if (here := _of_torch().get(name, value)) != value:
                raise InputError(
                    f"torch's default {name} is {value} in the process that launches and {here} in the workers. Set it where "
                    "they set it, too: at the top of the file that they import, or in the function or task itself."
                )
        for one in self.named:
            module = (
                main or sys.modules.get(MAIN_ALIAS) if one.module == MAIN else sys.modules.get(one.module)
            )
            if module is not None:
                self._compare(one, module)

    def _compare(self, one: Named, module: ModuleType) -> None:
        holder: Any = module
        for part in one.owner.split(".") if one.owner else ():
            holder = getattr(holder, part, None)
        here = (plain_attribute if one.owner else plain)(getattr(holder, one.name, ABSENT))
        if (here is ABSENT and not one.owner) or same(here, one.value):
            return
        files = {name: getattr(sys.modules.get(name), "__file__", None) for name, _ in self.reached}
        files[MAIN] = files[one.module] = getattr(module, "__file__", None)
        if is_written(one.name, self.reached, files):
            return
        if one.changed or is_fixed(
            files[one.module],
            one.owner,
            one.name,
            mutable=isinstance(one.value, list | dict),
            is_here=lambda value: same(plain(value), here),
        ):
            what = one.name if one.module == MAIN else f"{one.module}.{one.name}"
            what = f"{one.name} of {one.owner}" if one.owner else what
            remedy = self.remedy.replace(_NAME, one.name).replace(_VALUE, shown(one.value))
            if isinstance(one.value, Word):
                remedy = "write it into the file that they import, in a class of its own"
            raise InputError(
                f"{what} is {shown(one.value)} in the process that launches and {shown(here)} in the workers, which import "
                f"{'the script' if one.module == MAIN else one.module} anew: "
                f"{remedy}."
            )


def of_function(function: Any, *given: Any) -> LauncherValues:
    """Return what a function reads, and what it is given: its arguments."""
    name = getattr(function, "__name__", "main")
    return _noted(
        (function, *given), f"pass it as an argument, launch({name}, {_NAME}), or set it inside of {name}"
    )


def of_task(task: Any) -> LauncherValues:
    """Return what a task reads: a class or an instance."""
    return _noted(
        (task,),
        f"make it an argument of the task's constructor, settings={{'{_NAME}': {_VALUE}}}, or set it on an instance of the task "
        "and give that",
    )


_first: dict[tuple[str, str, str], Any] = {}
"""What this process had when it first launched something that reads a name."""


def _noted(roots: Iterable[Any], remedy: str) -> LauncherValues:
    walk = Walk()
    for root in roots:
        walk.visit(root)
    named = []
    for key, value in walk.found.items():
        changed = not same(_first.setdefault(key, value), value)
        named.append(Named(*key, value, changed))
    return LauncherValues(tuple(named), frozenset(walk.reached), tuple(_of_torch().items()), remedy)


def _of_torch() -> dict[str, str]:
    """Return what torch makes tensors as, unless it is told; nothing in a process that has not loaded it."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    return {"dtype": str(torch.get_default_dtype()), "device": str(torch.get_default_device())}
