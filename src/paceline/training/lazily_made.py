"""What a run's first step makes: objects and hooks that no checkpoint can hold, and the flags and sizes beside them.

`if not self.ready: self.loss_fn = nn.MSELoss(); self.ready = True` makes both in the first step of every start. A start that was
given the flag alone would never make the object. So an attribute that changed exactly in those steps in which an object of the
same owner came to be, or was replaced, is the object's companion, and stays what the start makes of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from paceline.training.attribute_owners import MADE, TASK, read_one
from paceline.training.attribute_refusals import HOOKS, KIND, Key
from paceline.training.attribute_values import held_back, same
from paceline.training.saved_attributes import ABSENT

_FOLLOWED = 8
"""For how many steps an object may be replaced in every one of them and still be followed."""


class LazilyMade:
    """Looks behind the passes and behind the hooks of the first step, and follows what was found there."""

    def __init__(self) -> None:
        self._before: tuple[dict[Key, Any], dict[Key, Any]] | None = None
        self.fresh: tuple[dict[Key, Any], dict[Key, Any]] = {}, {}
        """What there was before the first step, until that has ended."""
        self._owners: dict[str, Any] = {}
        self._steps = 0
        self._pairs: dict[tuple[Key, Key], int] = {}
        """Objects, each with what changed beside it, and in how many steps that was."""
        self._last: dict[Key, Any] = {}

    def begin(self, found: dict[Key, Any], objects: dict[Key, Any]) -> None:
        """Note what there is before the first step of this start."""
        self._before = self.fresh = found, objects

    @property
    def awaits_first(self) -> bool:
        """Whether the first step of this start has not ended."""
        return self._before is not None

    def look(
        self, owners: dict[str, Any], found: dict[Key, Any], objects: dict[Key, Any], *, ends: bool
    ) -> None:
        """Find what came to be since the last look in the first step, which `ends` here."""
        if self._before is None:
            return
        was, held = self._before
        made = [key for key, one in objects.items() if held.get(key, ABSENT) is not one]
        changed = [key for key, value in found.items() if not same(value, was.get(key, ABSENT))]
        names = {name for name, _ in was}
        made += [key for key in changed if _is_made(key, found[key], was, names)]
        beside = dict[str, list[Key]]()
        for key in changed:
            if key[1] not in MADE and held_back(found[key]) is None:
                beside.setdefault(key[0], []).append(key)
        for one in made:
            for owner in _owners_of(one):
                self._pairs |= {(one, key): 1 for key in beside.get(owner, ())}
        self._before = None if ends else (found, objects)
        if ends:
            self._steps = 1
            self.rebase(owners)

    def rebase(self, owners: Mapping[str, Any]) -> None:
        """Follow the attributes of these owners, where modules were made anew."""
        keys = {key for pair in self._pairs for key in pair}
        self._owners = {name: owners[name] for name, _ in keys if name in owners}
        self._last = {key: read_one(self._owners, *key) for key in keys}

    def follow(self) -> None:
        """Note what a later step has replaced and changed of what was found."""
        if not self._pairs:
            return
        self._steps += 1
        now = {key: read_one(self._owners, *key) for key in self._last}
        moved = {key for key, value in now.items() if not _is_same(value, self._last[key])}
        for pair in list(self._pairs):
            made, beside = (key in moved for key in pair)
            self._pairs[pair] += made
            if made != beside or self._steps == self._pairs[pair] == _FOLLOWED:
                del self._pairs[pair]
        kept = {key for pair in self._pairs for key in pair}
        self._last = {key: value for key, value in now.items() if key in kept}

    def companions(self) -> dict[Key, bool]:
        """Return what is made along with an object, and whether that was in later steps too.

        What is replaced in every step, a batch that is kept say, has no companions. Of one step alone a float is one that goes
        on changing, more likely than not: a rate that is annealed.
        """
        found = dict[Key, bool]()
        for (_, key), times in self._pairs.items():
            if times < self._steps or (self._steps == 1 and type(self._last[key][0]) is not float):
                found[key] = found.get(key, False) or times > 1
        return found


def _is_made(key: Key, value: Any, was: Mapping[Key, Any], names: Set[str]) -> bool:
    """Return whether a change is of what no checkpoint can hold: a layer, a hook, a lambda; one that was lazy is no new layer."""
    if key[1] in MADE:
        return key in was or (key[1] == KIND and key[0] not in names)
    return held_back(value) is not None


def _owners_of(made: Key) -> tuple[str, ...]:
    """Return whose attributes may say that something was made."""
    name, attribute = made
    if attribute == HOOKS:
        return name, TASK
    return (name.rpartition(".")[0] or "the model",) if attribute == KIND else (name,)


def _is_same(value: Any, last: Any) -> bool:
    return same(value[0], last[0]) if type(value) is type(last) is tuple else value is last
