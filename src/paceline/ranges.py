"""The range of every number that a user can give, and the one check that refuses what lies outside. Imports no torch.

A class of options is a dataclass below `Options`; a number in it is written `workers: int = ranged(1, WORKERS)`. A number without
a range fails where the class is first used, so that none is forgotten. nan and the infinities lie in no range.
"""

from __future__ import annotations

import math
import operator
import types
import typing
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar

from paceline.errors import InputError, UnknownNameError

Default = TypeVar("Default")
_RANGE = "range"
NAME_BYTES, PATH_BYTES = 255, 4095
"""The longest name and the longest path that Linux takes."""


@dataclass(frozen=True)
class Range:
    """All numbers from `low` to `high`."""

    low: float
    high: float
    whole: bool = True
    above: bool = False
    """Whether `low` itself is outside."""
    below: bool = False
    """Whether `high` itself is."""

    def read(self, name: str, value: Any) -> Any:
        """Return the number as Python's own; raise InputError, with `name` in front, if it is none of these."""
        number = self._number(value)
        if number is None:
            kind = "a whole number" if self.whole else "a number"
            raise InputError(f"{name} is {value!r}, but must be {kind}.")
        if not math.isfinite(number) if isinstance(number, float) else False:
            raise InputError(f"{name} is {number}, but must be a number {self._words(low=True, high=True)}.")
        if number < self.low or (self.above and number == self.low):
            raise InputError(f"{name} is {_shown(number)}, but must be {self._words(low=True)}.")
        if number > self.high or (self.below and number == self.high):
            raise InputError(f"{name} is {_shown(number)}, but must be {self._words(high=True)}.")
        return number

    def _number(self, value: Any) -> int | float | None:
        if isinstance(value, bool):
            return None
        try:
            whole = operator.index(value)
        except TypeError:
            whole = None
        if self.whole or whole is not None:
            # A float cannot hold every int; what is too large for one is outside anyway.
            return whole if self.whole or whole is None or abs(whole) > 2**53 else float(whole)
        return float(value) if isinstance(value, Real) else None

    def _words(self, *, low: bool = False, high: bool = False) -> str:
        words = []
        if low:
            words.append(f"{'above' if self.above else 'at least'} {_shown(self.low)}")
        if high:
            words.append(f"{'below' if self.below else 'at most'} {_shown(self.high)}")
        return " and ".join(words)


def _shown(number: float) -> str:
    if isinstance(number, float):
        return f"{number:g}"
    return (
        str(number)
        if abs(number) < 10**30
        else f"a number of {int(number.bit_length() * 0.30103) + 1} digits"
    )


STEPS = Range(1, 10**12)
COUNT = Range(1, 10**9)
COUNT_OR_NONE = Range(0, 10**9)
WORKERS = Range(1, 1024)
THREADS = Range(1, 1024)
SHARDS = Range(1, 2**16)
SEED = Range(0, 2**63 - 1)
LOADERS = Range(0, 1024)
# What a run writes down of itself; the widths of a ledger's fields are among the bounds.
STEPS_TAKEN = Range(0, 10**12)
EPOCH = Range(0, 2**32 - 1)
GENERATION = Range(0, 2**32 - 1)
SAMPLES = Range(0, 2**63 - 1)
"""A data set without an end has the largest length that Python knows."""
HORIZON = Range(0, COUNT.high * SAMPLES.high)
PROCESSES = Range(1, 2 * WORKERS.high)
"""Workers and servers."""
MACHINE_SECONDS = Range(4, 10**6)
"""A machine that is silent for less may well be alive."""
SECONDS = Range(0, 10**7, whole=False, above=True)
CLIP = Range(0, 1e18, whole=False, above=True)
"""A largest norm."""


TASK: dict[str, Range] = {
    "batch_size": COUNT,
    "shards": SHARDS,
    "epochs": COUNT,
    "seed": SEED,
    "clip": CLIP,
    "micro_batch": COUNT,
    "loader_workers": LOADERS,
}
"""What the numbers among a task's attributes may be: as on the command line."""


def ranged(default: Default, within: Range) -> Default:
    """Return a field of a class of options that holds a number, or None, within a range."""
    made: Default = field(default=default, metadata={_RANGE: within})
    return made


def required(within: Range) -> Any:
    """Return such a field without a default."""
    return field(metadata={_RANGE: within})


class Options:
    """A dataclass of options: every field is checked against its type and its range when the object is made."""

    def __post_init__(self) -> None:
        options: Any = type(self)
        kinds = _kinds(options)
        for one in fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            value = getattr(self, one.name)
            read = _checked(flag(one.name), value, kinds[one.name], one.metadata.get(_RANGE))
            if read is not value:
                object.__setattr__(self, one.name, read)

    @classmethod
    def made(cls, given: typing.Mapping[str, Any], what: str = "option") -> typing.Self:
        """Make the object of keywords from Python or from a file; a name nobody knows is refused with the nearest."""
        known = [one.name for one in fields(cls)]  # type: ignore[arg-type]
        for name in given:
            if name not in known:
                raise UnknownNameError(what, str(name), known)
        return cls(**given)


def flag(name: str) -> str:
    """Return an option's name as the command line has it."""
    return f"--{name.replace('_', '-')}"


@cache
def _kinds(options: Any) -> dict[str, frozenset[Any]]:
    """Return the plain types that each field may have; nothing for one that is no plain value."""
    found: dict[str, frozenset[Any]] = {}
    hints = typing.get_type_hints(options)
    for one in fields(options):
        hint = hints[one.name]
        union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        args = typing.get_args(hint) if union else (hint,)
        args = tuple(
            int if typing.get_origin(arg) is tuple and typing.get_args(arg)[:1] == (int,) else arg
            for arg in args
        )
        plain = all(arg in (int, float, bool, str, Path, type(None)) for arg in args)
        found[one.name] = frozenset(args) if plain else frozenset()
        if plain and {int, float} & set(args) and _RANGE not in one.metadata:
            raise TypeError(
                f"{options.__name__}.{one.name} is a number without a range: write it with ranged(...)"
            )
        if one.default is not MISSING and _RANGE in one.metadata:
            _checked(f"the default of {one.name}", one.default, found[one.name], one.metadata[_RANGE])
    return found


def _checked(name: str, value: Any, kinds: frozenset[Any], within: Range | None) -> Any:
    if not kinds or (value is None and type(None) in kinds):
        return value
    if within is not None:
        if isinstance(value, tuple):
            return tuple(within.read(name, part) for part in value)
        return within.read(name, value)
    if bool in kinds:
        if not isinstance(value, bool):
            raise InputError(f"{name} is {value!r}, but must be True or False.")
    elif Path in kinds:
        return folder(name, value)
    elif not isinstance(value, str):
        raise InputError(f"{name} is {value!r}, but must be text.")
    return value


def folder(name: str, given: Any) -> Path:
    """Return a folder as a path; raise InputError where no file system would take it."""
    if not isinstance(given, str | Path):
        raise InputError(f"{name} is {given!r}, but must be the path of a folder.")
    text = str(given)
    if not text or "\0" in text or (isinstance(given, str) and not given.strip()):
        raise InputError(f"{name} is {text!r}, which is no path. Give a folder, or leave it out.")
    longest = max((len(part.encode("utf-8", "surrogateescape")) for part in text.split("/")), default=0)
    if longest > NAME_BYTES or len(text.encode("utf-8", "surrogateescape")) > PATH_BYTES:
        raise InputError(
            f"{name} is a path of {len(text)} characters with a name of {longest} bytes, and Linux takes names up to "
            f"{NAME_BYTES}. Give a shorter one."
        )
    return Path(given)
