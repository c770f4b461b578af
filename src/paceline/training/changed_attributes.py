"""Plain attributes of modules and task that a run has changed: a group that forms anew, and who joins it, goes on with them.

`model.bn.eval()`, `model.drop.p = 0.5` or `model.opts["k"] = 0.5` behind some step is in no tensor. A worker that joins has run
the function from its top, but not that step; what makes modules anew for a group has not either. So each worker knows what there
was when its steps began, and who joins takes over what all others have changed alike, where it has what they began with.
What differs among workers, by their rank say, is left alone. What cannot be handed on (another layer, a hook, a lambda) ends the
run, where all others have changed it alike. A run that goes back has again what there was at the step that it goes back to, and
one that goes on from a checkpoint what there was where that was saved.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from paceline.task import Task
from paceline.training.attribute_changes import Changes, Then, Told, alike, combined, together
from paceline.training.attribute_owners import (
    MADE,
    TASK,
    attributes_held,
    owners_of,
    put,
    read_all,
    set_changes,
    tables_of,
    value_of,
)
from paceline.training.attribute_refusals import KIND, Key, check_alike, check_set_back, used
from paceline.training.attribute_values import held_back, same, shown
from paceline.training.awaited_attributes import Awaited
from paceline.training.held_objects import HELD, is_from_clock, is_log
from paceline.training.lazily_made import LazilyMade
from paceline.training.saved_attributes import ABSENT, AnObjectsError, encoded
from paceline.training.start_objects import StartObjects, holds_values
from paceline.world import World, all_gather_object

_Told = tuple[bool, Changes, dict[int, Then]]
"""Whether a worker joins, what has changed on it, and what had at each checkpoint."""


class ChangedAttributes:
    """What one worker knows of its modules and its task."""

    def __init__(self) -> None:
        self._began: dict[Key, Any] | None = None
        self._others: frozenset[Key] = frozenset()
        """What held something that is not compared when the steps began."""
        self._held: dict[str, type] = {}
        """The objects that modules and task held then, by the names of their owners."""
        self._objects = StartObjects({}, {})
        self._tables: dict[Key, Any] = {}
        """The tables that attributes held then, which others may hold too."""
        self._kept: Changes = {}
        """What is to be put on modules that are being made anew."""
        self._kept_replaced: set[Key] = set()
        self._kept_anew: frozenset[Key] = frozenset()
        self._saved: dict[int, Then] = {}
        """What had changed at each checkpoint, by the number of steps."""
        self._awaited = Awaited()
        self._lazy = LazilyMade()

    def begin(self, model: nn.Module, task: Task | None) -> None:
        """Note what there is where the first step is about to be taken, or this worker about to join."""
        if self._began is None:
            owners = owners_of(model, task)
            self._held = {name: type(one) for name, one in owners.items() if HELD in name}
            found, objects = read_all(owners)
            self._tables = {key: one for key, one in tables_of(owners).items() if key in found}
            self._began, self._others, self._objects = (
                found,
                frozenset(objects),
                StartObjects(owners, objects),
            )
            self._lazy.begin(found, objects)

    def keep(self, model: nn.Module, task: Task | None) -> None:
        """Note what has changed, before modules are made anew for the next group."""
        then = self.now(model, task)
        self._kept |= then.changes
        self._kept_anew = then.anew
        self._kept_replaced = self._objects.replaced(*reversed(read_all(self._owners(model, task))))

    def put_back(self, model: nn.Module, task: Task | None) -> None:
        """Have the modules of the next group be set as those before; raise where one is of another class."""
        if self._began is None:
            return
        owners, kept = self._owners(model, task), self._kept
        for key, (_, now) in kept.items():
            check_alike(key, now, value_of(owners, *key), "the next group makes it")
        set_changes(owners, kept)
        found, objects = read_all(owners)
        self._began = found | {
            key: was for key, (was, now) in kept.items() if same(value_of(owners, *key), now)
        }
        self._kept = {}
        self._objects.rebase(objects, self._kept_replaced)
        tables = tables_of(owners)
        self._tables = {
            key: tables[key] for key in self._tables if key in tables and key not in self._kept_anew
        }
        if self._lazy.awaits_first:
            self._lazy.begin(found, objects)
        self._lazy.rebase(owners)

    def changes(self, model: nn.Module, task: Task | None) -> Changes:
        """Return what has changed since the steps began."""
        return self.now(model, task).changes

    def now(self, model: nn.Module, task: Task | None) -> Then:
        """Return what has changed by now, should the run go back to here."""
        if self._began is None:
            return Then({})
        owners = self._owners(model, task)
        return self._then(owners, *read_all(owners))

    def _owners(self, model: nn.Module, task: Task | None) -> dict[str, Any]:
        """Return what counts of what there is: modules and task, and objects of the class that was there when the steps began."""
        owners = owners_of(model, task)
        return {
            name: one for name, one in owners.items() if HELD not in name or type(one) is self._held.get(name)
        }

    def _then(self, owners: Mapping[str, Any], now: dict[Key, Any], objects: Mapping[Key, Any]) -> Then:
        began = self._began or {}
        # Not once more for each checkpoint.
        others = self._others if objects.keys() == self._others else frozenset(objects)
        keys = dict.fromkeys((*began, *now))
        pairs = {key: (began.get(key, ABSENT), now.get(key, ABSENT)) for key in keys}

        def is_gone(key: Key) -> bool:
            """Return whether it is no plain value any more, or was a module's that is no more: its class tells that."""
            return key not in now and key[1] not in MADE and (key in objects or key[0] not in owners)

        changes = {key: pair for key, pair in pairs.items() if not same(*pair) and not is_gone(key)}
        tables = tables_of(owners)
        anew = frozenset(
            key for key in changes if key in tables and self._tables.get(key, tables[key]) is not tables[key]
        )
        return Then(changes, others, anew=anew)

    def agree(
        self, world: World, model: nn.Module, task: Task | None, *, joins: bool, computes: bool
    ) -> None:
        """Set those who join as all others are set alike; every worker of the group calls it, and all raise where that fails."""
        knows = computes and not joins
        lazy = self._lazy.companions()
        mine = (
            {key: pair for key, pair in self.changes(model, task).items() if key not in lazy} if knows else {}
        )
        if joins:
            self.begin(model, task)  # else what it takes over would be no change, in a checkpoint say
        everybody: list[_Told] = all_gather_object(world.comm, (joins, mine, self._saved if knows else {}))
        if not any(is_new for is_new, _, _ in everybody):
            return
        owners = self._owners(model, task)
        names = frozenset(owners) if computes else frozenset()
        there: list[frozenset[str]] = all_gather_object(world.comm, names)
        old = [place for place, (is_new, _, _) in enumerate(everybody) if not is_new]
        changes = alike([(everybody[place][1], there[place]) for place in old])
        present = {key: value_of(owners, *key) for key in changes if key[0] in owners} if computes else {}
        values: list[dict[Key, Any]] = all_gather_object(world.comm, present)
        for (is_new, _, _), found in zip(everybody, values, strict=True):
            for key, (_, now) in changes.items():
                if is_new and found:
                    check_alike(key, now, found.get(key, ABSENT), "a worker that joins makes it")
        if joins:
            set_changes(owners, changes)
            numbers = {number for _, _, saved in everybody for number in saved}
            self._saved = {
                number: together([(everybody[place][2].get(number), there[place]) for place in old])
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
        self,
        world: World,
        model: nn.Module,
        task: Task | None,
        mine: Then | None,
        saved: Then | None,
        *,
        computes: bool,
    ) -> Then:
        """Return what this worker is to have where all go back; who does not know has what those who do have alike.

        Where nobody knows it is what the checkpoint has `saved`; without one nothing had changed: it is the beginning.
        """
        names = frozenset(self._owners(model, task)) if computes else frozenset()
        companions = frozenset(self._lazy.companions())
        told: list[tuple[Then | None, frozenset[str], frozenset[Key]]] = all_gather_object(
            world.comm, (mine, names, companions)
        )
        if mine is not None:
            return mine
        if all(one is None for one, _, _ in told):
            return saved or Then({}, self._others)
        return together(
            [(one, names) for one, names, _ in told], but=companions.union(*(lazy for *_, lazy in told))
        )

    def set_back(self, model: nn.Module, task: Task | None, then: Then, number: int) -> None:
        """Have everything be set as it was then, after so many steps; raise where that cannot be."""
        if self._began is None:
            return
        owners = self._owners(model, task)
        now, others = read_all(owners)
        wanted = self._began | {key: value for key, (_, value) in then.changes.items()}
        # What was lazy then has another class as soon as it has computed, and keeps what it was given.
        lazy = {name for name, _ in wanted if name != TASK and (name, KIND) not in wanted}
        companions = self._lazy.companions()
        for key in dict.fromkeys((*wanted, *now)):
            was, value = wanted.get(key, ABSENT), now.get(key, ABSENT)
            is_held = (key in others and key not in then.changes) or key in then.others
            is_elsewhere = key[0] not in owners and key not in self._began  # with another worker's stage
            is_lazy = key[0] in lazy and key not in then.changes
            if is_held or is_elsewhere or is_lazy or key in companions or same(was, value):
                continue
            check_set_back(key, was, value, number)
            name, attribute = key
            if attribute in MADE or name not in owners:
                continue
            there = self._tables.get(key, attributes_held(owners[name]).get(attribute))
            put(owners[name], attribute, was, None if key in then.anew else there)

    # In a checkpoint.

    def to_save(
        self,
        world: World,
        model: nn.Module,
        task: Task | None,
        *,
        computes: bool,
        registered: Collection[object] = (),
    ) -> dict[str, Any] | None:
        """Return what a checkpoint holds of what all have changed alike; every worker of the group calls it.

        Objects that are `registered` are saved by their own state.
        """
        began, rows = self._began or {}, dict[Key, Any]()
        owners = self._owners(model, task) if computes and began else {}
        found, objects = read_all(owners)
        then = self._then(owners, found, objects) if owners else Then({})
        left, moved = self._left(owners, found, objects), self._objects.used(objects)
        moved |= {key for key in left if holds_values(objects.get(key))}  # which no start counts again
        ids = set(map(id, registered))
        saved = {key for key in left | moved if _is_in(ids, owners.get(key[0]), objects.get(key))}
        left, moved = left - moved - saved, moved - saved
        made, companions, beside = {name for name, _ in began}, self._lazy.companions(), list[Any]()
        for key, (was, now) in then.changes.items():
            if key[1] in MADE and was == ABSENT and key[0] in made:
                continue  # it was lazy, and computes by now
            if key in companions:
                beside.append([*key, encoded(now), companions[key]])
                continue
            if is_log(getattr(now, "value", None)):
                continue
            try:
                rows[key] = encoded(was), encoded(now)
            except AnObjectsError:
                left |= {key}
        told: list[Told] = all_gather_object(world.comm, (rows, left, beside, moved))
        if self._began is None or not any(any(one) for one in told):
            return None
        there: list[frozenset[str]] = all_gather_object(world.comm, frozenset(owners))
        return combined(told, there, then.anew)

    def _left(
        self, owners: Mapping[str, Any], found: Mapping[Key, Any], objects: Mapping[Key, Any]
    ) -> set[Key]:
        """Return which attributes were set to objects that no checkpoint can hold, or hold another object than they did."""
        own = {id(one) for name, one in owners.items() if HELD not in name}

        def is_known(key: Key) -> bool:
            name, attribute = key
            value = objects.get(key)
            if isinstance(value, nn.Module):  # of layers only what is plain is held elsewhere
                return id(value) in own
            return is_log(value) or f"{attribute}{HELD}{name}" in owners

        new = objects.keys() - self._others
        left = {key for key in new | self._objects.replaced(objects, found) if not is_known(key)}
        return {(name, attribute) for name, attribute in left if name in owners}

    def from_saved(self, saved: Then, model: nn.Module, task: Task | None) -> tuple[Then, list[str]]:
        """Return what a checkpoint holds less what this run was given anew, and what to say of that."""
        began, now = self._began or {}, read_all(self._owners(model, task))[0]
        anew = {
            key: (was, value)
            for key, (was, value) in saved.changes.items()
            if key[1] not in MADE
            and key[0] in self._owners(model, task)
            and not same(began.get(key, ABSENT), was)
            and not same(now.get(key, ABSENT), value)
        }
        texts = [
            f"{attribute} of {name} was changed in the run from {_named(was)} to {_named(value)}, but this start begins with "
            f"{_named(began.get((name, attribute), ABSENT))}, which stays."
            for (name, attribute), (was, value) in anew.items()
            if not is_from_clock(began.get((name, attribute), ABSENT))
        ]
        kept = {key: pair for key, pair in saved.changes.items() if key not in anew}
        return replace(saved, changes=kept), texts

    def go_on(
        self, world: World, model: nn.Module, task: Task | None, saved: Then, number: int, *, computes: bool
    ) -> list[str]:
        """Have everything be set as it was where the run was saved, and return notes; every worker calls it."""
        owners = self._owners(model, task) if computes else {}
        there: list[frozenset[str]] = all_gather_object(world.comm, frozenset(owners))
        if not computes:
            return []
        then, texts = self.from_saved(saved, model, task)
        somewhere = frozenset().union(*there)
        awaited = {key: ABSENT for key in then.unsaved if key[0] in owners}
        texts += [used(key) for key in sorted(then.used) if key[0] in owners]
        for key, (was, value) in then.changes.items():
            if key[0] not in owners and key[0] in somewhere:
                continue
            if key[1] == KIND and was != ABSENT:
                check_alike(key, value, value_of(owners, *key), "this start makes it")
            elif key[0] not in owners or key[1] in MADE or held_back(value) is not None:
                awaited[key] = value
        self.set_back(model, task, replace(then, others=then.others.union(awaited)), number)
        # As changes they are in the next checkpoint too.
        changed = {key: was for key, (was, _) in then.changes.items() if key[0] in owners}
        self._began = (self._began or {}) | changed
        self._lazy.begin(*read_all(owners))
        self._awaited = Awaited(awaited, then.beside)
        return texts

    # Behind steps.

    def after_passes(self, model: nn.Module, task: Task | None) -> None:
        """Look behind the passes of a first step, before its hooks."""
        if self._lazy.awaits_first:
            owners = self._owners(model, task)
            self._lazy.look(owners, *read_all(owners), ends=False)

    def after_step(self, model: nn.Module, task: Task | None) -> list[str]:
        """Look behind a step and its hooks; return what to tell of what is awaited where a first one has not made it again."""
        if not self._lazy.awaits_first:
            self._lazy.follow()
            return []
        owners = self._owners(model, task)
        found, objects = read_all(owners)
        self._lazy.look(owners, found, objects, ends=True)
        self._objects.add(objects)
        awaited, self._awaited = self._awaited, Awaited()
        texts = awaited.notes(owners, (found, objects), self._lazy)
        self._lazy.fresh = {}, {}
        return texts


def _is_in(ids: Collection[int], owner: Any, value: Any) -> bool:
    """Return whether an attribute's value, what it belongs to or what it holds is one of these objects."""
    held = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return bool(ids) and any(id(one) in ids for one in (owner, value, *held))


def _named(copy: Any) -> str:
    return "none" if copy == ABSENT else shown(copy)
