"""What of two descriptions differs, cut out and put into words."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from paceline.training.plain_values import ABSENT, Record, Word, same

_SHOWN = 60
_LARGEST = 10**40


def parts_of(value: Any) -> dict[Any, Any] | None:
    """Return the parts of a table or an object by name; None where it is neither."""
    return value.fields if isinstance(value, Record) else value if isinstance(value, dict) else None


def differing(one: Any, other: Any) -> list[Any] | None:
    """Return the keys at which two tables or objects differ; None where they are not two of a kind."""
    mine, others = parts_of(one), parts_of(other)
    if mine is None or others is None or type(one) is not type(other):
        return None
    if isinstance(one, Record) and one.kind != other.kind:
        return None
    keys = [*mine, *(key for key in others if key not in mine)]
    return [key for key in keys if not same(mine.get(key, ABSENT), others.get(key, ABSENT))]


def without(value: Any, keys: Collection[Any]) -> Any:
    """Return a table or an object without some of its parts."""
    parts = {key: one for key, one in (parts_of(value) or {}).items() if key not in keys}
    return Record(value.kind, parts) if isinstance(value, Record) else parts


def pair(one: Any, other: Any) -> tuple[str, str]:
    """Return two descriptions for a message: of tables the parts that differ."""
    first, second = cut(one, other)
    texts = shown(first), shown(second)
    if texts[0] == texts[1]:
        return texts[0], f"another {texts[1].removeprefix('a ')}"
    return texts


def cut(one: Any, other: Any) -> tuple[Any, Any]:
    """Return what of two tables differs; both whole where they are none."""
    keys = differing(one, other)
    if keys is None:
        return one, other
    mine, others = parts_of(one) or {}, parts_of(other) or {}
    both: tuple[dict[Any, Any], dict[Any, Any]] = ({}, {})
    for key in keys:
        first, second = cut(mine.get(key, ABSENT), others.get(key, ABSENT))
        for part, value in zip(both, (first, second), strict=True):
            if value != ABSENT:
                part[key] = value
    if isinstance(one, Record):
        return Record(one.kind, both[0]), Record(one.kind, both[1])
    return both


def shown(value: Any) -> str:
    """Return a description for a message, cut where it is long."""
    text = repr(_small(value))
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _small(value: Any) -> Any:
    """Return it without numbers that Python will not write out."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > _LARGEST:
        return Word(f"a number of {value.bit_length()} bits")
    if isinstance(value, list):
        return [_small(one) for one in value]
    if isinstance(value, dict):
        return {_small(key): _small(one) for key, one in value.items()}
    return Record(value.kind, _small(value.fields)) if isinstance(value, Record) else value
