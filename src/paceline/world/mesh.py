"""`Mesh`: the workers as a grid with named sides, and the answer to every question about ranks. Imports no torch.

Ranks count along the last side first, so the sides that talk most (tp) hold neighbours, and those that talk least
(pp, ddp) reach furthest. Data is dealt out along `ddp` and `fsdp`; workers that differ only in `tp` or `pp` work on the
same samples. Servers come after all ranks of the grid: they hold parameters for it, and no data is dealt to them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from paceline.errors import InputError

SIDES = ("pp", "ddp", "fsdp", "tp")
"""From the outermost to the innermost."""
DATA = ("ddp", "fsdp")
"""Along these, samples are dealt out; along the others, the workers of one replica share its samples."""
SAME_SAMPLES = tuple(side for side in SIDES if side not in DATA)
SERVERS = "servers"


@dataclass(frozen=True)
class Mesh:
    """A grid of workers; a side that is not named has length 1."""

    sizes: tuple[tuple[str, int], ...]
    servers: int = field(default=0, kw_only=True)
    """Workers that stand beside the grid, after its last rank."""

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> Mesh:
        """Make a mesh in the order of `SIDES`, leaving out nothing that was named."""
        unknown = [side for side in sizes if side not in SIDES]
        if unknown:
            raise InputError(f"{unknown[0]} is no side of a mesh. Use {', '.join(SIDES)}.")
        return cls(tuple((side, sizes[side]) for side in SIDES if side in sizes))

    @classmethod
    def flat(cls, workers: int) -> Mesh:
        """Return the mesh of workers that all do the same with other data."""
        return cls((("ddp", workers),))

    @cached_property
    def workers(self) -> int:
        """How many workers it takes, servers included."""
        return self.trainers + self.servers

    @cached_property
    def trainers(self) -> int:
        """How many of them are in the grid."""
        return math.prod(size for _, size in self.sizes)

    def serves(self, rank: int) -> bool:
        """Return whether a worker is a server."""
        return self.servers > 0 and rank >= self.trainers

    def size(self, *sides: str) -> int:
        """Return how many workers of the grid there are along these sides."""
        return math.prod(size for side, size in self.sizes if side in sides)

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return a worker's place on each side."""
        places: dict[str, int] = {}
        for side, size in reversed(self.sizes):
            rank, places[side] = divmod(rank, size)
        return {side: places[side] for side, _ in self.sizes}

    def index(self, rank: int, *sides: str) -> int:
        """Return a worker's place along these sides taken together, from 0; a server's is after the last."""
        if self.serves(rank):
            return self.size(*sides)
        places, index = self.coordinate(rank), 0
        for side, size in self.sizes:
            if side in sides:
                index = index * size + places[side]
        return index

    def members(self, rank: int, *sides: str) -> list[int]:
        """Return the ranks that differ from `rank` at most along these sides, by their place there; servers have each other."""
        if self.serves(rank):
            return list(range(self.trainers, self.workers))
        return [
            other for other in range(self.trainers) if self._rest(other, sides) == self._rest(rank, sides)
        ]

    def group(self, rank: int, *sides: str) -> int:
        """Number the groups that these sides make, and give the one that `rank` is in; the servers' is after the last."""
        others = tuple(side for side, _ in self.sizes if side not in sides)
        return self.index(rank, *others)

    def leads(self, rank: int, *sides: str) -> bool:
        """Return whether a worker of the grid is the first of those along these sides."""
        if self.serves(rank):
            return False
        places = self.coordinate(rank)
        return not any(places.get(side) for side in sides)

    def _rest(self, rank: int, sides: Iterable[str]) -> tuple[int, ...]:
        return tuple(place for side, place in self.coordinate(rank).items() if side not in sides)

    def __str__(self) -> str:
        sizes = (*self.sizes, (SERVERS, self.servers)) if self.servers else self.sizes
        return ",".join(f"{side}={size}" for side, size in sizes)
