"""Values that the launching process has changed where workers import the code anew, and would train with the old ones.

The launcher notes what a function or a task reads by name: globals of the user's modules, attributes of his classes, torch's
default type and device. A worker compares that with what it has imported, before anything runs. What is certain to be meant
otherwise is refused; of what may be, the user is told; what is another in each process by its source passes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from paceline.errors import InputError
from paceline.training.code_walk import Walk
from paceline.training.differences import cut, differing, pair, parts_of, shown, without
from paceline.training.plain_values import ABSENT, EMPTY_SET, Many, Record, Word, is_permuted, plain, same
from paceline.training.script import MAIN, MAIN_ALIAS
from paceline.training.source_trees import Reached, is_read, written_by
from paceline.training.source_values import is_fixed
from paceline.training.source_volatile import is_volatile
from paceline.training.source_writes import ANY, Write, own_attributes
from paceline.world import env

_NAME, _VALUE, _KEY = "<name>", "<value>", "<key>"
"""Where a remedy says them."""
_MOST = 3
"""How many values a note names."""


@dataclass(frozen=True)
class NamedValue:
    """A value that workers find by a name."""

    module: str
    owner: str
    """The class that has it as an attribute; empty for a global of the module."""
    name: str
    value: Any
    changed: bool
    """Whether it was another when this process first launched something that reads it."""

    @property
    def spelled(self) -> str:
        """As the script would write it."""
        said = f"{self.owner}.{self.name}" if self.owner else self.name
        return said if self.module == MAIN else f"{self.module}.{said}"


@dataclass(frozen=True)
class LauncherValues:
    """What the launching process has, for a worker to compare."""

    named: tuple[NamedValue, ...] = field(default=(), repr=False)
    reached: Reached = field(default=frozenset(), repr=False)
    attributes: frozenset[str] | None = field(default=None, repr=False)
    """The attributes that the code reads of objects; None where it may read any."""
    torch: tuple[tuple[str, str], ...] = ()
    remedy: str = ""
    """What to do about a value; empty where workers have found what they run without this process."""
    refuses: bool = True
    """Whether a value that is certain to be another than it seems ends the run; else it is told."""

    def check(self, main: ModuleType | None = None) -> tuple[str, ...]:
        """Compare with what this worker has imported; `main` is the script here.

        Raise InputError where a value is certain to be another than the launcher has; return what to tell of others.
        """
        for name, value in self.torch:
            if (here := _of_torch().get(name, value)) != value:
                raise InputError(
                    f"torch's default {name} is {value} in the process that launches and {here} in the workers. Set it where "
                    "they set it, too: at the top of the file that they import, or in the function or task itself."
                )
        compared = _Comparison(self, main or _imported_script())
        for one in self.named:
            compared.compare(one)
        return compared.notes()


class _Comparison:
    """One worker's look at what the launcher has sent."""

    def __init__(self, values: LauncherValues, main: ModuleType | None) -> None:
        self._values, self._main = values, main
        self._told: list[tuple[NamedValue, Any]] = []

    def notes(self) -> tuple[str, ...]:
        """Return what to tell: one line."""
        if not self._told:
            return ()
        said = []
        for one, here in self._told[:_MOST]:
            there, found = pair(one.value, here)
            said.append(f"{one.spelled} is {there} in the process that launches and {found} in the workers")
        more = f", and {len(self._told) - _MOST} more" if len(self._told) > _MOST else ""
        files = sorted({Path(self._file(one.module) or one.module).name for one, _ in self._told[:_MOST]})
        first, here = self._told[0]
        apart = cut(first.value, here)
        way = self._way(first, apart[0])
        if is_permuted(*apart):
            way = f"only the order differs, as that of a set does between processes: sort it, or {way}"
        return (
            f"{'; '.join(said)}{more}, which import {' and '.join(files)} anew; {way}, if they are to have it",
        )

    def _way(self, one: NamedValue, value: Any) -> str:
        """Return what to do for workers to have a value."""
        remedy = self._values.remedy
        if _VALUE in remedy and isinstance(value, Word | Record):  # no text of a command line
            return (
                "set it on an instance of the task and give that, or write it into the file that they import"
            )
        return remedy.replace(_NAME, one.spelled).replace(_KEY, one.name).replace(_VALUE, shown(value))

    def compare(self, one: NamedValue) -> None:
        """Compare a value with this process's own: raise InputError, or keep it to be told, or pass it."""
        module = self._module(one.module)
        if module is None:
            return
        holder: Any = module
        for part in one.owner.split(".") if one.owner else ():
            holder = getattr(holder, part, None)
        held = getattr(holder, "__dict__", {})
        here = plain(held[one.name]) if one.name in held else ABSENT
        if (here == ABSENT and not one.owner) or same(here, one.value):
            return
        there = one.value
        if isinstance(there, Record) and isinstance(here, Record) and self._values.attributes is not None:
            unread = [name for name in {*there.fields, *here.fields} if name not in self._values.attributes]
            there, here = without(there, unread), without(here, unread)
            if same(there, here):
                return
        apart = differing(there, here)
        if apart is not None:
            drawn = [key for key in apart if is_volatile(self._file(one.module), one.owner, one.name, key)]
            there, here = without(there, drawn), without(here, drawn)
            if same(there, here):
                return
        seen = NamedValue(one.module, one.owner, one.name, there, one.changed)
        keys = self._written(one, there, here)
        if keys and (_is_passing(keys, there, here) or self._is_only_counted(one, holder)):
            return
        certain = ANY not in keys and ((one.changed and not keys) or self._is_fixed(one, here))
        if certain and self._values.refuses:
            raise InputError(self._refusal(seen, here, keys))
        file = self._file(one.module)
        if certain or keys or apart is not None or not is_volatile(file, one.owner, one.name):
            self._told.append((seen, here))

    def _refusal(self, one: NamedValue, here: Any, written: set[Any]) -> str:
        what = f"{one.name} of {one.owner}" if one.owner else one.spelled
        value, other = cut(one.value, here)
        if written:  # what is left is what the code that runs does not write
            value, other = without(value, written), without(other, written)
        there, found = pair(value, other)
        return (
            f"{what} is {there} in the process that launches and {found} in the workers, which import "
            f"{'the script' if one.module == MAIN else one.module} anew: {self._way(one, value)}. "
            f"Where it is meant so, {env.CHANGED_VALUES}=note runs it all the same."
        )

    def _is_fixed(self, one: NamedValue, here: Any) -> bool:
        mutable = isinstance(one.value, list | dict | Record | Many)
        file = self._file(one.module)
        return is_fixed(
            file, one.owner, one.name, mutable=mutable, is_here=lambda value: same(plain(value), here)
        )

    def _written(self, one: NamedValue, there: Any, here: Any) -> set[Any]:
        """Return which keys of a value, or ANY, the code that runs writes itself."""
        keys = set()
        for write in self._writes:
            if write.passed and not isinstance(there, list | dict | Record | Many):
                continue
            if (key := write.key_of(one.owner, one.name)) is not None:
                keys.add(key)
        if isinstance(there, Record):
            keys |= own_attributes(self._writes) & {*there.fields, *(parts_of(here) or {})}
        return keys

    def _is_only_counted(self, one: NamedValue, holder: Any) -> bool:
        """Return whether code only adds to a number or a table that it writes, and nothing looks at that."""
        above = getattr(holder, "__mro__", ())[1:]
        if one.owner and (self._values.attributes is None or any(one.name in vars(kind) for kind in above)):
            return False
        known = type(getattr(holder, "__dict__", {}).get(one.name)).__module__ in ("builtins", "collections")
        return known and not is_read(self._values.reached, self._file, one.name)

    @cached_property
    def _writes(self) -> list[Write]:
        return written_by(self._values.reached, self._file)

    def _module(self, name: str) -> ModuleType | None:
        return self._main if name == MAIN else sys.modules.get(name)

    def _file(self, name: str) -> str | None:
        found = getattr(self._module(name), "__dict__", {}).get("__file__")
        return found if isinstance(found, str) else None


def _is_passing(keys: set[Any], there: Any, here: Any) -> bool:
    """Return whether what differs is no more than a counter or a cache, which is empty in the worker."""
    others = differing(there, here)
    if others is None:
        return (
            not here
            or here == ABSENT
            or (isinstance(here, float) and not math.isfinite(here))
            or getattr(here, "text", "") == EMPTY_SET
        )
    mine, parts = parts_of(there) or {}, parts_of(here) or {}
    counted = [key for key in others if ANY in keys or key in keys]
    return counted == others and all(_is_passing({ANY}, mine.get(key), parts.get(key)) for key in others)


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
        f"make it an argument of the task's constructor, settings={{'{_KEY}': {_VALUE}}}, or set it on an instance of the task "
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
        named.append(NamedValue(*key, value, changed))
    return LauncherValues(
        tuple(named),
        frozenset(walk.reached),
        None if walk.any_attribute else frozenset(walk.attributes),
        tuple(_of_torch().items()),
        remedy,
        env.refuses_changed_values(),
    )


def _imported_script() -> ModuleType | None:
    """Return the script where this process has imported it; none where it runs the script itself, and has what it has set."""
    found = sys.modules.get(MAIN_ALIAS)
    return found if getattr(found, "__name__", None) == MAIN_ALIAS else None


def _of_torch() -> dict[str, str]:
    """Return what torch makes tensors as, unless it is told; nothing in a process that has not loaded it."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    return {"dtype": str(torch.get_default_dtype()), "device": str(torch.get_default_device())}
