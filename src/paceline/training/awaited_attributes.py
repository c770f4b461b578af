"""What a run had made and no checkpoint can give back: the first step of a start makes it again, or a note says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.training.attribute_owners import Read, value_of
from paceline.training.attribute_refusals import KIND, Key, unmade
from paceline.training.attribute_values import same
from paceline.training.lazily_made import LazilyMade
from paceline.training.saved_attributes import ABSENT


@dataclass(frozen=True)
class Awaited:
    """What a start is to make in its first step."""

    made: dict[Key, Any] = field(default_factory=dict)
    """What was set in the run; ABSENT stands for any object."""
    beside: dict[Key, tuple[Any, bool]] = field(default_factory=dict)
    """What the run had made along with such objects, and whether it did so in later steps too."""

    def notes(self, owners: Mapping[str, Any], now: Read, lazy: LazilyMade) -> list[str]:
        """Return what to tell of what was not made again, where the first step has ended."""
        if not (self.made or self.beside):
            return []
        companions = lazy.companions()
        # A size that follows the batches may be another by now.
        fixed = {
            key: value
            for key, (value, moves) in self.beside.items()
            if key[0] in owners and not (moves and key in companions)
        }
        return [
            unmade(
                key,
                value,
                [attribute for name, attribute in self.beside if name == key[0] and attribute != key[1]],
            )
            for key, value in (self.made | fixed).items()
            if (key[0] in owners or key[1] == KIND) and _is_unmade(key, value, owners, now, lazy.fresh)
        ]


def _is_unmade(key: Key, value: Any, owners: Mapping[str, Any], now: Read, fresh: Read) -> bool:
    if value != ABSENT:
        return not same(value_of(owners, *key), value)
    if key in now[1]:  # of an object only that it is another one can be known
        return now[1][key] is fresh[1].get(key, ABSENT)
    return same(now[0].get(key, ABSENT), fresh[0].get(key, ABSENT))
