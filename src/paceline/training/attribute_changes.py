"""What has changed of a run's attributes at some step: as workers tell each other of it, and as a checkpoint gives it back."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from paceline.training.attribute_refusals import Key
from paceline.training.attribute_values import same
from paceline.training.saved_attributes import decoded

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
    used: frozenset[Key] = frozenset()
    """Those that held a generator or an iterator, which the run has used."""
    beside: dict[Key, tuple[Any, bool]] = field(default_factory=dict)
    """What a checkpoint knows to have been made along with them, and whether that was in later steps too."""


def read_saved(entry: Any) -> Then | None:
    """Return what a checkpoint holds; raise ValueError, TypeError or LookupError where it is damaged."""
    if entry is None:
        return None
    try:
        return _read(entry)
    except (ArithmeticError, AttributeError, MemoryError, RuntimeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _read(entry: Any) -> Then:
    changes: Changes = {}
    for name, attribute, was, now in entry["alike"]:
        if not (isinstance(name, str) and isinstance(attribute, str)) or attribute[:1] in ("", "_"):
            raise ValueError(f"{attribute!r:.60} is no attribute that a run saves")
        changes[name, attribute] = decoded(was), decoded(now)
    beside = {
        (str(name), str(attribute)): (decoded(now), bool(moves))
        for name, attribute, now, moves in entry.get("beside", ())
    }
    others, unsaved, used = (
        frozenset((str(name), str(attribute)) for name, attribute in entry.get(part, ()))
        for part in ("others", "unsaved", "used")
    )
    return Then(changes, others, unsaved, used, beside)


def alike(told: Iterable[tuple[Changes, frozenset[str]]]) -> Changes:
    """Return what all have changed alike that have the module; beside their changes stands what modules there are."""
    told = list(told)
    found = {}
    for key in dict.fromkeys(key for changes, _ in told for key in changes):
        said = [changes.get(key) for changes, names in told if key[0] in names or key in changes]
        first = said[0]
        if first is not None and all(same(one, first) for one in said):
            found[key] = first
    return found


def together(told: Iterable[tuple[Then | None, frozenset[str]]], but: Collection[Key] = ()) -> Then:
    """Return what those who know of a step had alike, `but` what else a first step makes."""
    known = [(then, names) for then, names in told if then is not None]
    changes = alike([(then.changes, names) for then, names in known])
    changes = {key: pair for key, pair in changes.items() if key not in but}
    return Then(changes, frozenset().union(*(then.others for then, _ in known)))
