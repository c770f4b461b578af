"""Roles: named groups of workers, and the name of each worker. Imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from paceline.errors import InputError, UnknownNameError


@dataclass(frozen=True)
class Roles:
    """How many workers each role has; ranks count through the roles in their order."""

    sizes: tuple[tuple[str, int], ...]

    @classmethod
    def parse(cls, text: str) -> Roles:
        """Read `trainers=2,servers=1`."""
        sizes: dict[str, int] = {}
        for part in text.split(","):
            found = re.fullmatch(r"\s*([a-z][a-z_-]*)\s*=\s*(\d+)\s*", part)
            if found is None:
                raise InputError(
                    f"--roles {text}: {part.strip()!r} is no role. Give names and numbers, like trainers=2,servers=1."
                )
            if found[1] in sizes or int(found[2]) < 1:
                what = "is named twice" if found[1] in sizes else "has no worker"
                raise InputError(f"--roles {text}: {found[1]} {what}. Give each role once, with 1 or more.")
            sizes[found[1]] = int(found[2])
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
        """Give the role that a worker has."""
        return [role for role, size in self.sizes for _ in range(size)][rank]

    def workers(self, role: str) -> tuple[str, ...]:
        """Name the workers of a role, given as `servers` or `server`."""
        found = tuple(name for name in self.names if name.partition(":")[0] == _single(role))
        if not found:
            raise UnknownNameError("role", role, [name for name, _ in self.sizes])
        return found

    def resolve(self, name: str) -> str:
        """Give a worker's own name for what a user calls it: `server:0`, `servers:0`, or `server` where there is one."""
        role, _, index = name.partition(":")
        known = f"{_single(role)}:{index or 0}"
        if known not in self.names or (not index and len(self.workers(role)) > 1):
            raise UnknownNameError("worker", name, self.names)
        return known

    def __str__(self) -> str:
        return ",".join(f"{role}={size}" for role, size in self.sizes)


def _single(role: str) -> str:
    """Give the name of one of several: `servers` is made of a `server`."""
    return role[:-1] if role.endswith("s") and len(role) > 1 else role
