"""Options as fields of frozen dataclasses: each is written once, with its default, its range or names, its words and its group.

The command line with its help, Python keywords, `--config` files and the checks all come from these fields. A class of options is
a dataclass below `Options`; a number in it has a range, and one without fails where the class is first used, so that none is
forgotten. Imports no torch.
"""

from __future__ import annotations

import os
import types
import typing
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from paceline.errors import InputError, UnknownNameError
from paceline.ranges import Range

Default = TypeVar("Default")
_RANGE, _SHOWN = "range", "shown"
NAME_BYTES, PATH_BYTES = 255, 4095
"""The longest name and the longest path that Linux takes."""
COMMON = "Common"
DATA = "Data"
SPEED = "Precision and speed"
CHECKPOINTS = "Checkpoints and records"
ELASTICITY = "Lost workers"
MACHINES = "Machines"
GROUPS = (COMMON, DATA, SPEED, CHECKPOINTS, ELASTICITY, MACHINES)
"""In the order of the help; the groups of single strategies come after them."""
PER_MACHINE = "per machine"
"""Marks an option that may differ between the machines of a run, or that they compare when they meet."""
REPEATED = "repeated"
"""Marks a text that the command line may give several times: its parts, with commas between them."""
NOT_COMPARED = "not compared"
"""Marks an option of `train` that a comparison on this machine, in folders of its own, has no use for."""


@dataclass(frozen=True)
class Shown:
    """What the help says of an option."""

    words: str
    group: str
    default: str | None = None
    """The default in words, where the value does not say it; an empty text says nothing of it."""
    names: tuple[str, ...] = ()
    """The texts that it may be, where these are all."""
    metavar: str | None = None
    marks: tuple[str, ...] = ()
    """What else is to be known of it: PER_MACHINE, NOT_COMPARED."""
    users: tuple[tuple[str, str], ...] = ()
    """The strategies that it means something to, each with the side of the mesh it tunes; none where it serves all."""


def option(
    default: Default,
    words: str,
    group: str = COMMON,
    within: Range | None = None,
    *,
    names: tuple[str, ...] = (),
    shown: str | None = None,
    metavar: str | None = None,
    marks: tuple[str, ...] = (),
    users: tuple[tuple[str, str], ...] = (),
) -> Default:
    """Return a field that a user can give: its default, what the help says, and the numbers or names that it may be."""
    about = Shown(words, group, shown, names, metavar, marks, users)
    metadata = {_SHOWN: about} | ({} if within is None else {_RANGE: within})
    made: Default = field(default=default, metadata=metadata)
    return made


def shown(one: Field[Any]) -> Shown | None:
    """Return what the help says of a field; None where it is no option of the command line."""
    found: Shown | None = one.metadata.get(_SHOWN)
    return found


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
        given = {one.name: getattr(self, one.name) for one in fields(self)}  # type: ignore[arg-type]  # every subclass is one
        for name, read in self.read(given).items():
            if read is not given[name]:
                object.__setattr__(self, name, read)

    @classmethod
    def read(cls, given: typing.Mapping[str, Any]) -> dict[str, Any]:
        """Return some of the options as they are kept; raise InputError where one cannot be what it is."""
        options: Any = cls
        kinds, found = _kinds(options), {}
        for one in fields(options):
            if one.name not in given:
                continue
            value, about = given[one.name], shown(one)
            found[one.name] = _checked(flag(one.name), value, kinds[one.name], one.metadata.get(_RANGE))
            if about is not None and about.names and value is not None and value not in about.names:
                raise UnknownNameError(flag(one.name), str(value), about.names)
        return found

    @classmethod
    def made(cls, given: typing.Mapping[str, Any], what: str = "option") -> typing.Self:
        """Make the object of keywords from Python or from a file; a name nobody knows is refused with the nearest."""
        known = [one.name for one in fields(cls)]  # type: ignore[arg-type]
        for name in given:
            if name not in known:
                raise UnknownNameError(what, str(name), known)
        return cls(**given)


def known_options(*kinds: type[Options]) -> dict[str, Any]:
    """Return the options of some classes that a user can give, with their defaults."""
    found = {one.name: one for kind in kinds for one in fields(kind) if shown(one)}  # type: ignore[arg-type]
    return {name: None if one.default is MISSING else one.default for name, one in found.items()}


def marked(kind: type[Options], mark: str) -> tuple[str, ...]:
    """Return the options of a class that bear a mark."""
    return tuple(one.name for one in fields(kind) if (about := shown(one)) and mark in about.marks)  # type: ignore[arg-type]


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
    if within is not None and not (str in kinds and isinstance(value, str)):
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
    try:
        longest = max(len(os.fsencode(part)) for part in text.split("/"))
    except UnicodeEncodeError:
        raise InputError(f"{name} is {text!r}, which no file system takes. Give another path.") from None
    if longest > NAME_BYTES or len(os.fsencode(text)) > PATH_BYTES:
        raise InputError(
            f"{name} is a path of {len(text)} characters with a name of {longest} bytes, and Linux takes names up to "
            f"{NAME_BYTES}. Give a shorter one."
        )
    return Path(given)
