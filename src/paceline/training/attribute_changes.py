"""What has changed of a run's attributes at some step: as workers tell each other of it, and as a checkpoint gives it back."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
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
    anew: frozenset[Key] = frozenset()
    """Those of the changed ones that hold another table than when the steps began, not what that one came to hold."""
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
    others, unsaved, used, anew = (
        frozenset((str(name), str(attribute)) for name, attribute in entry.get(part, ()))
        for part in ("others", "unsaved", "used", "anew")
    )
    return Then(changes, others, unsaved, used, anew, beside)


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
    others, anew = (
        frozenset().union(*(getattr(then, part) for then, _ in known)) for part in ("others", "anew")
    )
    return Then(changes, others, anew=anew)


Told = tuple[dict[Key, Any], set[Key], list[Any], set[Key]]
"""What a worker would save: changes, what cannot be saved, what was made along with that, and what was used."""


def combined(told: Sequence[Told], there: Sequence[frozenset[str]], anew: Collection[Key]) -> dict[str, Any]:
    """Return what a checkpoint holds of what all workers have told; `there` are the owners that each of them has."""
    lazy = {
        (name, attribute): [name, attribute, *rest]
        for _, _, beside, _ in told
        for name, attribute, *rest in beside
    }
    changes = alike([(rows, names) for (rows, *_), names in zip(told, there, strict=True)])
    changes = {key: pair for key, pair in changes.items() if key not in lazy}
    known = changes.keys() | lazy.keys()
    others = {key for rows, left, *_ in told for key in (*rows, *left) if key not in known}
    unsaved = {key for _, left, *_ in told for key in left}
    return {
        "alike": [[*key, was, now] for key, (was, now) in changes.items()],
        "anew": [list(key) for key in sorted(anew) if key in changes],
        "beside": list(lazy.values()),
        "used": [list(key) for key in sorted({key for *_, used in told for key in used})],
        "others": [list(key) for key in sorted(others)],
        "unsaved": [list(key) for key in sorted(unsaved & others)],
    }
