"""Roles: named groups of workers, and the name of each worker. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from paceline.errors import InputError, UnknownNameError
from paceline.ranges import WORKERS

ROLES, INTERFACE = "PACELINE_ROLES", "PACELINE_INTERFACE"
"""The variables through which a launcher tells a script what `remote.join` needs."""


@dataclass(frozen=True)
class Roles:
    """How many workers each role has; ranks count through the roles in their order."""

    sizes: tuple[tuple[str, int], ...]

    @classmethod
    def parse(cls, text: str) -> Roles:
        """Read `trainers=2,servers=1`."""
        sizes: dict[str, int] = {}
        for part in text.split(","):
            name, _, number = (one.strip() for one in part.partition("="))
            if re.fullmatch(r"[0-9]{1,6}", number) is None:
                raise InputError(
                    f"{part.strip()!r} in {text!r} is no role. Give names and numbers, like trainers=2,servers=1."
                )
            if name in sizes:
                raise InputError(f"{name} is named twice in {text!r}. Give each role once.")
            sizes[name] = int(number)
        return cls.of(sizes)

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> Roles:
        """Take the roles as names with their numbers of workers."""
        if not sizes:
            raise InputError("there is no role, so nobody has anything to do. Give one, like trainers=2.")
        singles: dict[str, str] = {}
        for name, size in sizes.items():
            if re.fullmatch(r"[a-z][a-z_-]*", name) is None:
                raise InputError(f"{name!r} is no name for a role. Use small letters, like trainers.")
            WORKERS.read(f"the number of workers of the role {name}", size)
            if singles.setdefault(_single(name), name) != name:
                raise InputError(
                    f"a worker of {singles[_single(name)]} and one of {name} would have the same name. Call one otherwise."
                )
        return cls(tuple(sizes.items()))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The name of each worker, by rank: the second of `servers` is `server:1`."""
        return tuple(f"{_single(role)}:{index}" for role, size in self.sizes for index in range(size))

    @property
    def size(self) -> int:
        """How many workers there are in all."""
        return len(self.names)

    def role(self, rank: int) -> str:
        """Return the role that a worker has."""
        return self.sizes[self.index(rank)][0]

    def index(self, rank: int) -> int:
        """Return the place of a worker's role among the roles."""
        return [index for index, (_, size) in enumerate(self.sizes) for _ in range(size)][rank]

    def workers(self, role: str) -> tuple[str, ...]:
        """Name the workers of a role, given as `servers` or `server`."""
        found = tuple(name for name in self.names if name.partition(":")[0] == _single(role))
        if not found:
            raise UnknownNameError("role", role, [name for name, _ in self.sizes])
        return found

    def resolve(self, name: str) -> str:
        """Return a worker's own name for what a user calls it: `server:0`, `servers:0`, or `server` where there is one."""
        role, _, index = name.partition(":")
        known = f"{_single(role)}:{index or 0}"
        if known not in self.names or (not index and len(self.workers(role)) > 1):
            raise UnknownNameError("worker", name, self.names)
        return known

    def __str__(self) -> str:
        return ",".join(f"{role}={size}" for role, size in self.sizes)


def _single(role: str) -> str:
    """Return the name of one of several: `servers` is made of a `server`."""
    return role[:-1] if role.endswith("s") and len(role) > 1 else role
