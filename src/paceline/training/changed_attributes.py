"""Plain attributes of modules and task that a run has changed: a group that forms anew, and who joins it, goes on with them.

`model.bn.eval()`, `model.drop.p = 0.5` or `model.opts["k"] = 0.5` behind some step is in no tensor. A worker that joins has run
the function from its top, but not that step; what makes modules anew for a group has not either. So each worker knows what there
was when its steps began, and who joins takes over what all others have changed alike, where it has what they began with.
What differs among workers, by their rank say, is left alone. What cannot be handed on (another layer, a hook, a lambda) ends the
run, where all others have changed it alike. A run that goes back has again what there was at the step that it goes back to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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


@dataclass(frozen=True)
class Then:
    """What had changed at a step that a run may go back to."""

    changes: Changes
    others: frozenset[Key] = frozenset()
    """Attributes that held what is not compared: a tensor, an object."""


class ChangedAttributes:
    """What one worker knows of its modules and its task."""

    def __init__(self) -> None:
        self._began: dict[Key, Any] | None = None
        self._others: frozenset[Key] = frozenset()
        """What held something that is not compared when the steps began."""
        self._kept: Changes = {}
        """What is to be put on modules that are being made anew."""
        self._saved: dict[int, Then] = {}
        """What had changed at each checkpoint, by the number of steps."""

    def begin(self, model: nn.Module, task: Task | None) -> None:
        """Note what there is where the first step is about to be taken, or this worker about to join."""
        if self._began is None:
            self._began, self._others = _read(model, task)

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
        self._began = _read(model, task)[0] | {
            key: was for key, (was, now) in kept.items() if same(_value(owners, *key), now)
        }
        self._kept = {}

    def changes(self, model: nn.Module, task: Task | None) -> Changes:
        """Return what has changed since the steps began."""
        return self.now(model, task).changes

    def now(self, model: nn.Module, task: Task | None) -> Then:
        """Return what has changed by now, should the run go back to here."""
        began = self._began
        if began is None:
            return Then({})
        now, others = _read(model, task)
        if others == self._others:
            others = self._others  # not once more for each checkpoint
        keys = dict.fromkeys((*began, *now))
        pairs = {key: (began.get(key, ABSENT), now.get(key, ABSENT)) for key in keys}
        changes = {key: pair for key, pair in pairs.items() if not same(*pair) and not _is_gone(key, now)}
        return Then(changes, others)

    def agree(
        self, world: World, model: nn.Module, task: Task | None, *, joins: bool, computes: bool
    ) -> None:
        """Set those who join as all others are set alike; every worker of the group calls it, and all raise where that fails."""
        knows = computes and not joins
        mine = self.changes(model, task) if knows else {}
        everybody: list[_Told] = all_gather_object(world.comm, (joins, mine, self._saved if knows else {}))
        if not any(is_new for is_new, _, _ in everybody):
            return
        owners = _owners(model, task)
        names = frozenset(owners) if computes else frozenset()
        there: list[frozenset[str]] = all_gather_object(world.comm, names)
        old = [place for place, (is_new, _, _) in enumerate(everybody) if not is_new]
        alike = _alike([(everybody[place][1], there[place]) for place in old])
        present = {key: _value(owners, *key) for key in alike if key[0] in owners} if computes else {}
        values: list[dict[Key, Any]] = all_gather_object(world.comm, present)
        for (is_new, _, _), found in zip(everybody, values, strict=True):
            for key, (_, now) in alike.items():
                if is_new and found:
                    _check_alike(key, now, found.get(key, ABSENT), "a worker that joins makes it")
        if joins:
            _set(owners, alike)
            numbers = {number for _, _, saved in everybody for number in saved}
            self._saved = {
                number: _together([(everybody[place][2].get(number), there[place]) for place in old])
                for number in numbers
            }

    # Going back.

    def note_saved(self, number: int, model: nn.Module, task: Task | None, there: Sequence[int]) -> None:
        """Note what has changed where a checkpoint of so many steps was written, beside the others that are `there`."""
        newest = max(there, default=-1)  # those behind it may be on their way to the disk
        self._saved = {old: then for old, then in self._saved.items() if old > newest or old in there}
        self._saved[number] = self.now(model, task)

    def saved_at(self, number: int) -> Then | None:
        """Return what had changed at a checkpoint, if that is known."""
        return self._saved.get(number)

    def agree_then(
        self, world: World, model: nn.Module, task: Task | None, mine: Then | None, *, computes: bool
    ) -> Then:
        """Return what this worker is to have where all go back; who does not know has what those who do have alike.

        Where nobody knows nothing had changed: it is the beginning, or a checkpoint that this run began with.
        """
        names = frozenset(_owners(model, task)) if computes else frozenset()
        told: list[tuple[Then | None, frozenset[str]]] = all_gather_object(world.comm, (mine, names))
        if mine is not None:
            return mine
        if all(one is None for one, _ in told):
            return Then({}, self._others)
        return _together(told)

    def set_back(self, model: nn.Module, task: Task | None, then: Then, number: int) -> None:
        """Have everything be set as it was then, after so many steps; raise where that cannot be."""
        if self._began is None:
            return
        owners = _owners(model, task)
        now, others = _read(model, task)
        wanted = self._began | {key: value for key, (_, value) in then.changes.items()}
        # What was lazy then has another class as soon as it has computed, and keeps what it was given.
        lazy = {name for name, _ in wanted if name != TASK and (name, KIND) not in wanted}
        for key in dict.fromkeys((*wanted, *now)):
            was, value = wanted.get(key, ABSENT), now.get(key, ABSENT)
            is_held = key in others or (was == ABSENT and key in then.others)
            is_elsewhere = key[0] not in owners and key not in self._began  # with another worker's stage
            if is_held or is_elsewhere or key[0] in lazy or same(was, value):
                continue
            _check_set_back(key, was, value, number)
            name, attribute = key
            if attribute in _MADE or name not in owners:
                continue
            if was == ABSENT:
                delattr(owners[name], attribute)
            else:
                _put(owners[name], attribute, opened(was))


_Told = tuple[bool, Changes, dict[int, Then]]
"""Whether a worker joins, what has changed on it, and what had at each checkpoint."""


def _alike(told: Iterable[tuple[Changes, frozenset[str]]]) -> Changes:
    """Return what all have changed alike that have the module; beside their changes stands what modules there are."""
    told = list(told)
    alike = {}
    for key in dict.fromkeys(key for changes, _ in told for key in changes):
        said = [changes.get(key) for changes, names in told if key[0] in names or key in changes]
        first = said[0]
        if first is not None and all(same(one, first) for one in said):
            alike[key] = first
    return alike


def _together(told: Iterable[tuple[Then | None, frozenset[str]]]) -> Then:
    """Return what those who know of a step had alike."""
    known = [(then, names) for then, names in told if then is not None]
    alike = _alike([(then.changes, names) for then, names in known])
    return Then(alike, frozenset().union(*(then.others for then, _ in known)))


def _owners(model: nn.Module, task: Task | None) -> dict[str, Any]:
    """Return everything whose attributes count, by name."""
    owners: dict[str, Any] = {name or "the model": module for name, module in model.named_modules()}
    return owners if task is None else {**owners, TASK: task}


def _read(model: nn.Module, task: Task | None) -> tuple[dict[Key, Any], frozenset[Key]]:
    """Return every attribute that counts, with the class of each module, and which attributes hold something else."""
    found, others = dict[Key, Any](), set[Key]()
    for name, owner in _owners(model, task).items():
        if isinstance(owner, nn.Module) and not isinstance(owner, LazyModuleMixin):
            found[name, KIND], found[name, HOOKS] = _kind(owner), _hooks(owner)
        for attribute, value in vars(owner).items():
            if attribute[0] == "_":
                continue
            if (copy := copied(value)) is None:
                others.add((name, attribute))
            else:
                found[name, attribute] = copy[0]
    return found, frozenset(others)


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
    if value is ABSENT:
        return value
    copy = copied(value)
    return _kind(value) if copy is None else copy[0]  # of others nothing is compared


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


def _check_set_back(key: Key, was: Any, now: Any, number: int) -> None:
    """Raise where what was changed in the run since a step cannot be undone."""
    name, attribute = key
    if attribute == KIND:
        what, made = ("no module" if one == ABSENT else f"a {one.rpartition('.')[2]}" for one in (now, was))
        raise InputError(
            f"{name} was replaced in the run and is {what} by now, but the run goes back to step {number}, where it was {made}, "
            "and the answer would be another. Make every module before the first step, and switch between them by an attribute "
            "that forward() reads."
        )
    if attribute == HOOKS and ABSENT not in (was, now):
        what, made = (", ".join(_short(one) for one in hooks) or "none" for hooks in (now, was))
        raise InputError(
            f"{name} was given other hooks in the run (by now {what}), but the run goes back to step {number}, where it had "
            f"{made}, and the answer would be another. Register every hook before the first step, and switch it by an attribute "
            "of the module that it reads."
        )
    function = held_back(was)
    if function is not None:
        raise InputError(
            f"{attribute} of {name} was set in the run to {'nothing' if now == ABSENT else shown(now)}, but the run goes back to "
            f"step {number}, where it was {function.name}, which cannot be looked up by name. Define the function at the top of "
            "a module."
        )


def _short(hook: str) -> str:
    """Return the table and the name of a hook, without its code."""
    return " ".join(hook.split()[:2])
