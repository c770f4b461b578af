"""Plain attributes of modules and task that a run has changed: a group that forms anew, and who joins it, goes on with them.

`model.bn.eval()`, `model.drop.p = 0.5` or `model.opts["k"] = 0.5` behind some step is in no tensor. A worker that joins has run
the function from its top, but not that step; what makes modules anew for a group has not either. So each worker knows what there
was when its steps began, and who joins takes over what all others have changed alike, where it has what they began with.
What differs among workers, by their rank say, is left alone. What cannot be handed on (another layer, a hook, a lambda) ends the
run, where all others have changed it alike. A run that goes back has again what there was at the step that it goes back to, and
one that goes on from a checkpoint what there was where that was saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from paceline.task import Task
from paceline.training.attribute_owners import MADE, TASK, owners_of, put, read_all, value_of
from paceline.training.attribute_refusals import KIND, Key, check_alike, check_set_back
from paceline.training.attribute_values import held_back, opened, same, shown
from paceline.training.saved_attributes import ABSENT, AnObjectsError, decoded, encoded
from paceline.world import World, all_gather_object

Changes = dict[Key, tuple[Any, Any]]
"""What an attribute was when the steps began, and what it is."""


@dataclass(frozen=True)
class Then:
    """What had changed at a step that a run may go back to."""

    changes: Changes
    others: frozenset[Key] = frozenset()
    """Attributes that held what is not compared (a tensor, an object), or what workers did not have alike."""
    unsaved: frozenset[Key] = frozenset()
    """Those of them that a checkpoint knows to have been set in the run."""


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
        self.awaited: dict[Key, Any] = {}
        """What a checkpoint says and cannot give back: a first step may make it again. ABSENT stands for any object."""

    def begin(self, model: nn.Module, task: Task | None) -> None:
        """Note what there is where the first step is about to be taken, or this worker about to join."""
        if self._began is None:
            self._began, self._others = read_all(model, task)

    def keep(self, model: nn.Module, task: Task | None) -> None:
        """Note what has changed, before modules are made anew for the next group."""
        self._kept |= self.changes(model, task)

    def put_back(self, model: nn.Module, task: Task | None) -> None:
        """Have the modules of the next group be set as those before; raise where one is of another class."""
        if self._began is None:
            return
        owners, kept = owners_of(model, task), self._kept
        for key, (_, now) in kept.items():
            check_alike(key, now, value_of(owners, *key), "the next group makes it")
        set_changes(owners, kept)
        self._began = read_all(model, task)[0] | {
            key: was for key, (was, now) in kept.items() if same(value_of(owners, *key), now)
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
        now, others = read_all(model, task)
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
        if joins:
            self.begin(model, task)  # else what it takes over would be no change, in a checkpoint say
        everybody: list[_Told] = all_gather_object(world.comm, (joins, mine, self._saved if knows else {}))
        if not any(is_new for is_new, _, _ in everybody):
            return
        owners = owners_of(model, task)
        names = frozenset(owners) if computes else frozenset()
        there: list[frozenset[str]] = all_gather_object(world.comm, names)
        old = [place for place, (is_new, _, _) in enumerate(everybody) if not is_new]
        alike = _alike([(everybody[place][1], there[place]) for place in old])
        present = {key: value_of(owners, *key) for key in alike if key[0] in owners} if computes else {}
        values: list[dict[Key, Any]] = all_gather_object(world.comm, present)
        for (is_new, _, _), found in zip(everybody, values, strict=True):
            for key, (_, now) in alike.items():
                if is_new and found:
                    check_alike(key, now, found.get(key, ABSENT), "a worker that joins makes it")
        if joins:
            set_changes(owners, alike)
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
        names = frozenset(owners_of(model, task)) if computes else frozenset()
        told: list[tuple[Then | None, frozenset[str]]] = all_gather_object(world.comm, (mine, names))
        if mine is not None:
            return mine
        if all(one is None for one, _ in told):
            return saved or Then({}, self._others)
        return _together(told)

    def set_back(self, model: nn.Module, task: Task | None, then: Then, number: int) -> None:
        """Have everything be set as it was then, after so many steps; raise where that cannot be."""
        if self._began is None:
            return
        owners = owners_of(model, task)
        now, others = read_all(model, task)
        wanted = self._began | {key: value for key, (_, value) in then.changes.items()}
        # What was lazy then has another class as soon as it has computed, and keeps what it was given.
        lazy = {name for name, _ in wanted if name != TASK and (name, KIND) not in wanted}
        for key in dict.fromkeys((*wanted, *now)):
            was, value = wanted.get(key, ABSENT), now.get(key, ABSENT)
            is_held = key in others or key in then.others
            is_elsewhere = key[0] not in owners and key not in self._began  # with another worker's stage
            is_lazy = key[0] in lazy and key not in then.changes
            if is_held or is_elsewhere or is_lazy or same(was, value):
                continue
            check_set_back(key, was, value, number)
            name, attribute = key
            if attribute in MADE or name not in owners:
                continue
            if was == ABSENT:
                delattr(owners[name], attribute)
            else:
                put(owners[name], attribute, opened(was))

    # In a checkpoint.

    def to_save(
        self, world: World, model: nn.Module, task: Task | None, *, computes: bool
    ) -> dict[str, Any] | None:
        """Return what a checkpoint holds of what all have changed alike; every worker of the group calls it."""
        began, then = self._began or {}, self.now(model, task) if computes else Then({})
        rows, left = dict[Key, Any](), then.others - self._others
        made = {name for name, _ in began}
        for key, (was, now) in then.changes.items():
            if key[1] in MADE and was == ABSENT and key[0] in made:
                continue  # it was lazy, and computes by now
            try:
                rows[key] = encoded(was), encoded(now)
            except AnObjectsError:
                left |= {key}
        told: list[tuple[dict[Key, Any], frozenset[Key]]] = all_gather_object(world.comm, (rows, left))
        if self._began is None or not any(rows or left for rows, left in told):
            return None
        names = frozenset(owners_of(model, task)) if computes else frozenset()
        there: list[frozenset[str]] = all_gather_object(world.comm, names)
        alike = _alike([(rows, names) for (rows, _), names in zip(told, there, strict=True)])
        others = {key for rows, left in told for key in (*rows, *left) if key not in alike}
        unsaved = {key for _, left in told for key in left}
        return {
            "alike": [[*key, was, now] for key, (was, now) in alike.items()],
            "others": [list(key) for key in sorted(others)],
            "unsaved": [list(key) for key in sorted(unsaved & others)],
        }

    def from_saved(self, saved: Then, model: nn.Module, task: Task | None) -> tuple[Then, list[str]]:
        """Return what a checkpoint holds less what this run was given anew, and what to say of that."""
        began, now = self._began or {}, read_all(model, task)[0]
        anew = {
            key: (was, value)
            for key, (was, value) in saved.changes.items()
            if key[1] not in MADE
            and key[0] in owners_of(model, task)
            and not same(began.get(key, ABSENT), was)
            and not same(now.get(key, ABSENT), value)
        }
        texts = [
            f"{attribute} of {name} was changed in the run from {_named(was)} to {_named(value)}, but this start begins with "
            f"{_named(began.get((name, attribute), ABSENT))}, which stays."
            for (name, attribute), (was, value) in anew.items()
        ]
        kept = {key: pair for key, pair in saved.changes.items() if key not in anew}
        return Then(kept, saved.others, saved.unsaved), texts

    def go_on(
        self, world: World, model: nn.Module, task: Task | None, saved: Then, number: int, *, computes: bool
    ) -> list[str]:
        """Have everything be set as it was where the run was saved, and return notes; every worker calls it."""
        owners = owners_of(model, task) if computes else {}
        there: list[frozenset[str]] = all_gather_object(world.comm, frozenset(owners))
        if not computes:
            return []
        then, texts = self.from_saved(saved, model, task)
        somewhere = frozenset().union(*there)
        self.awaited = {key: ABSENT for key in then.unsaved if key[0] in owners}
        for key, (was, value) in then.changes.items():
            if key[0] not in owners and key[0] in somewhere:
                continue
            if key[1] == KIND and was != ABSENT:
                check_alike(key, value, value_of(owners, *key), "this start makes it")
            elif key[0] not in owners or key[1] in MADE or held_back(value) is not None:
                self.awaited[key] = value
        self.set_back(model, task, Then(then.changes, then.others.union(self.awaited)), number)
        # As changes they are in the next checkpoint too.
        changed = {key: was for key, (was, _) in then.changes.items() if key[0] in owners}
        self._began = (self._began or {}) | changed
        return texts

    def unmade(self, model: nn.Module, task: Task | None) -> list[str]:
        """Return what to tell of what is awaited, where the first step of this start has not made it again."""
        owners, awaited, self.awaited = owners_of(model, task), self.awaited, {}
        began, others = self._began or {}, read_all(model, task)[1]

        def is_unmade(key: Key, value: Any) -> bool:
            now = value_of(owners, *key)
            if value == ABSENT:  # of an object only that it is there can be known
                return key not in others and same(now, began.get(key, ABSENT))
            return not same(now, value)

        return [
            f"{attribute} of {name} was set in the run to what no checkpoint holds "
            f"({'an object' if value == ABSENT else _named(value)}), and this start has not set it in its first step: where the "
            "passes use it, the weights will not be those of a run that was never left. Make it before the first step."
            for (name, attribute), value in awaited.items()
            if (name in owners or attribute == KIND) and is_unmade((name, attribute), value)
        ]


def read_saved(entry: Any) -> Then | None:
    """Return what a checkpoint holds; raise ValueError, TypeError or LookupError where it is damaged."""
    if entry is None:
        return None
    changes: Changes = {}
    for name, attribute, was, now in entry["alike"]:
        if not (isinstance(name, str) and isinstance(attribute, str)) or attribute[:1] in ("", "_"):
            raise ValueError(f"{attribute!r:.60} is no attribute that a run saves")
        changes[name, attribute] = decoded(was), decoded(now)
    others, unsaved = (
        frozenset((str(name), str(attribute)) for name, attribute in entry.get(part, ()))
        for part in ("others", "unsaved")
    )
    return Then(changes, others, unsaved)


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


def _named(copy: Any) -> str:
    return "none" if copy == ABSENT else shown(copy)


def _is_gone(key: Key, now: Iterable[Key]) -> bool:
    """Return whether an attribute is no more, or no plain value any more: a module that is no more has no class either."""
    return key not in now and key[1] not in MADE


def set_changes(owners: Mapping[str, Any], changes: Changes) -> None:
    """Change what is as it was where the changes began."""
    for (name, attribute), (was, now) in changes.items():
        if attribute not in MADE and name in owners and same(value_of(owners, name, attribute), was):
            put(owners[name], attribute, opened(now))
