"""Plain attributes of modules and task that a run has changed: a group that forms anew, and who joins it, goes on with them.

`model.bn.eval()`, `model.drop.p = 0.5` or `model.k = 0.5` behind some step is in no tensor. A worker that joins has run the
function from its top, but not that step; what makes modules anew for a group has not either. So each worker knows what there
was when its steps began, and who joins takes over what all others have changed alike, where it has what they began with.
What differs among workers, by their rank say, is left alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from paceline.errors import InputError
from paceline.task import Task
from paceline.world import World, all_gather_object

Key = tuple[str, str]
"""The name of a module and of an attribute."""
TASK, KIND = "the task", "its class"
_PLAIN = (bool, int, float, str, type(None))


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
        for (name, attribute), (_, now) in kept.items():
            if attribute == KIND and _value(owners, name, KIND) != now:
                raise InputError(
                    _other_kind(name, now, _value(owners, name, KIND), "the next group makes it")
                )
        _set(owners, kept)
        self._began = dict(_read(model, task)) | {
            key: was for key, (was, now) in kept.items() if _same(_value(owners, *key), now)
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
        return {key: pair for key, pair in pairs.items() if not _same(*pair) and not _is_gone(key, now)}

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
            if first is not None and all(_same(one, first) for one in said):
                alike[key] = first
        for (is_new, _), there in zip(everybody, values, strict=True):
            for key, (_, now) in alike.items():
                if is_new and there and key[1] == KIND and not _same(there.get(key, ABSENT), now):
                    raise InputError(
                        _other_kind(key[0], now, there.get(key, ABSENT), "a worker that joins makes it")
                    )
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
        for attribute, value in vars(owner).items():
            if attribute[0] != "_" and _is_plain(value):
                yield (name, attribute), value


def _kind(owner: object) -> str:
    return f"{type(owner).__module__}.{type(owner).__qualname__}"


def _value(owners: Mapping[str, Any], name: str, attribute: str) -> Any:
    if name not in owners:
        return ABSENT
    if attribute == KIND:
        return _kind(owners[name])
    value = vars(owners[name]).get(attribute, ABSENT)
    return value if value is ABSENT or _is_plain(value) else _kind(value)  # of which nothing is compared


def _is_plain(value: object) -> bool:
    return type(value) in _PLAIN or (type(value) is tuple and all(map(_is_plain, value)))


def _is_gone(key: Key, now: Iterable[Key]) -> bool:
    """Return whether an attribute is no more, or no plain value any more: a module that is no more has no class either."""
    return key not in now and key[1] != KIND


def _same(value: Any, other: Any) -> bool:
    """Return whether two plain values are equal: 1 is not True here, and nan is itself."""
    return repr(value) == repr(other)


def _set(owners: Mapping[str, Any], changes: Changes) -> None:
    """Change what is as it was where the changes began."""
    for (name, attribute), (was, now) in changes.items():
        if attribute != KIND and name in owners and _same(_value(owners, name, attribute), was):
            setattr(owners[name], attribute, now)


def _other_kind(name: str, now: Any, made: Any, who: str) -> str:
    """Return why a group cannot go on with a module that is of one class here, and another there."""
    what, instead = ("no module" if one is ABSENT else f"a {one.rpartition('.')[2]}" for one in (now, made))
    return (
        f"{name} was replaced in the run and is {what} by now, but {who} {instead}, and the answer would be another. Make "
        "every module before the first step, and switch between them by an attribute that forward() reads."
    )
