"""Plain attributes of modules and task that a run has changed: a group that forms anew, and who joins it, goes on with them.

`model.bn.eval()`, `model.drop.p = 0.5` or `model.opts["k"] = 0.5` behind some step is in no tensor. A worker that joins has run
the function from its top, but not that step; what makes modules anew for a group has not either. So each worker knows what there
was when its steps began, and who joins takes over what all others have changed alike, where it has what they began with.
What differs among workers, by their rank say, is left alone. What cannot be handed on (another layer, a hook, a lambda) ends the
run, where all others have changed it alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from paceline.compat.modules import HOOKS as HOOK_TABLES
from paceline.errors import InputError
from paceline.task import Task
from paceline.training.attribute_values import copied, described, held_back, opened, same, shown
from paceline.world import World, all_gather_object

Key = tuple[str, str]
"""The name of a module and of an attribute."""
TASK, KIND, HOOKS = "the task", "its class", "its hooks"
_MADE = (KIND, HOOKS)
"""What is compared beside attributes, and is never set."""


@dataclass(frozen=True)
class Absent:
    """Stands for the value of an attribute that is not there."""


ABSENT = Absent()
Changes = dict[Key, tuple[Any, Any]]
"""What an attribute was when the steps began, and what it is."""


class ChangedAttributes:
    """What one worker knows of its modules and its task."""

    def __init__(self) -> None:
        self._began: dict[Key, Any] | None = None
        self._kept: Changes = {}
        """What is to be put on modules that are being made anew."""

    def begin(self, model: nn.Module, task: Task | None) -> None:
        """Note what there is where the first step is about to be taken, or this worker about to join."""
        if self._began is None:
            self._began = dict(_read(model, task))

    def keep(self, model: nn.Module, task: Task | None) -> None:
        """Note what has changed, before modules are made anew for the next group."""
        self._kept |= self.changes(model, task)

    def put_back(self, model: nn.Module, task: Task | None) -> None:
        """Have the modules of the next group be set as those before; raise where one is of another class."""
        if self._began is None:
            return
        owners, kept = _owners(model, task), self._kept
        for key, (_, now) in kept.items():
            _check_alike(key, now, _value(owners, *key), "the next group makes it")
        _set(owners, kept)
        self._began = dict(_read(model, task)) | {
            key: was for key, (was, now) in kept.items() if same(_value(owners, *key), now)
        }
        self._kept = {}

    def changes(self, model: nn.Module, task: Task | None) -> Changes:
        """Return what has changed since the steps began."""
        began = self._began
        if began is None:
            return {}
        now = dict(_read(model, task))
        keys = dict.fromkeys((*began, *now))
        pairs = {key: (began.get(key, ABSENT), now.get(key, ABSENT)) for key in keys}
        return {key: pair for key, pair in pairs.items() if not same(*pair) and not _is_gone(key, now)}

    def agree(
        self, world: World, model: nn.Module, task: Task | None, *, joins: bool, computes: bool
    ) -> None:
        """Set those who join as all others are set alike; every worker of the group calls it, and all raise where that fails."""
        mine = self.changes(model, task) if computes and not joins else {}
        everybody: list[tuple[bool, Changes]] = all_gather_object(world.comm, (joins, mine))
        keys = dict.fromkeys(key for _, changes in everybody for key in changes)
        if not keys or not any(one for one, _ in everybody):
            return
        owners = _owners(model, task)
        present = {key: _value(owners, *key) for key in keys if key[0] in owners} if computes else {}
        values: list[dict[Key, Any]] = all_gather_object(world.comm, present)
        alike = {}
        for key in keys:
            said = [
                changes.get(key)
                for (is_new, changes), there in zip(everybody, values, strict=True)
                if not is_new and (key in there or key in changes)
            ]
            first = said[0]
            if first is not None and all(same(one, first) for one in said):
                alike[key] = first
        for (is_new, _), there in zip(everybody, values, strict=True):
            for key, (_, now) in alike.items():
                if is_new and there:
                    _check_alike(key, now, there.get(key, ABSENT), "a worker that joins makes it")
        if joins:
            _set(owners, alike)


def _owners(model: nn.Module, task: Task | None) -> dict[str, Any]:
    """Return everything whose attributes count, by name."""
    owners: dict[str, Any] = {name or "the model": module for name, module in model.named_modules()}
    return owners if task is None else {**owners, TASK: task}


def _read(model: nn.Module, task: Task | None) -> Iterator[tuple[Key, Any]]:
    """Give every attribute that counts, and the class of each module."""
    for name, owner in _owners(model, task).items():
        if isinstance(owner, nn.Module) and not isinstance(owner, LazyModuleMixin):
            yield (name, KIND), _kind(owner)
            yield (name, HOOKS), _hooks(owner)
        for attribute, value in vars(owner).items():
            if attribute[0] != "_" and (copy := copied(value)) is not None:
                yield (name, attribute), copy[0]


def _kind(owner: object) -> str:
    return f"{type(owner).__module__}.{type(owner).__qualname__}"


def _hooks(owner: nn.Module) -> list[str]:
    """Return the hooks on a module that a user has put there, with the table of each."""
    found = [
        f"{table.strip('_')[:-1]} {said}"
        for table in HOOK_TABLES
        for hook in vars(owner).get(table, {}).values()
        if not (said := described(hook)).startswith(("paceline.", "torch."))
    ]
    return sorted(found)


def _value(owners: Mapping[str, Any], name: str, attribute: str) -> Any:
    if name not in owners:
        return ABSENT
    if attribute in _MADE:
        return _kind(owners[name]) if attribute == KIND else _hooks(owners[name])
    value = vars(owners[name]).get(attribute, ABSENT)
    copy = None if value is ABSENT else copied(value)
    return (
        value if value is ABSENT else _kind(value) if copy is None else copy[0]
    )  # of others nothing is compared


def _is_gone(key: Key, now: Iterable[Key]) -> bool:
    """Return whether an attribute is no more, or no plain value any more: a module that is no more has no class either."""
    return key not in now and key[1] not in _MADE


def _set(owners: Mapping[str, Any], changes: Changes) -> None:
    """Change what is as it was where the changes began."""
    for (name, attribute), (was, now) in changes.items():
        if attribute not in _MADE and name in owners and same(_value(owners, name, attribute), was):
            _put(owners[name], attribute, opened(now))


def _put(owner: Any, attribute: str, value: Any) -> None:
    """Give an attribute a value; a table stays the one that others may hold too."""
    there = vars(owner).get(attribute)
    if type(there) is not type(value) or not isinstance(value, dict | list | set):
        setattr(owner, attribute, value)
    elif isinstance(there, list):
        there[:] = value
    else:
        there.clear()
        there.update(value)


def _check_alike(key: Key, now: Any, made: Any, who: str) -> None:
    """Raise where a group cannot go on: what was changed in the run is another here, and cannot be handed on."""
    name, attribute = key
    if same(now, made):
        return
    if attribute == KIND:
        what, instead = (
            "no module" if one == ABSENT else f"a {one.rpartition('.')[2]}" for one in (now, made)
        )
        raise InputError(
            f"{name} was replaced in the run and is {what} by now, but {who} {instead}, and the answer would be another. Make "
            "every module before the first step, and switch between them by an attribute that forward() reads."
        )
    if attribute == HOOKS:
        if ABSENT in (now, made):
            return  # the module is gone or new, which its class tells
        what, instead = (", ".join(_short(one) for one in hooks) or "none" for hooks in (now, made))
        raise InputError(
            f"{name} was given other hooks in the run (by now {what}), but {who} with {instead}, and the answer would be "
            "another. Register every hook before the first step, and switch it by an attribute of the module that it reads."
        )
    function = held_back(now)
    if function is not None:
        raise InputError(
            f"{attribute} of {name} was set in the run to {function.name}, which no other process can look up by name, but {who} "
            f"{'without it' if made == ABSENT else f'with {shown(made)}'}, and the answer would be another. Define the function "
            "at the top of a module; or set it before the first step, and switch it by a plain attribute."
        )


def _short(hook: str) -> str:
    """Return the table and the name of a hook, without its code."""
    return " ".join(hook.split()[:2])
