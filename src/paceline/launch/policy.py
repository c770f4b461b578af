"""What a run allows when workers are lost, and how those who are left are laid out. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.data.shards import owned_shards
from paceline.strategies import Choice
from paceline.world.mesh import DATA, Mesh


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What may be done about a lost worker."""

    workers: int
    shards: int
    elastic: bool = True
    trains: bool = False
    """Whether the workers are known to train; a function of the user's only once they say so."""
    min_workers: int = 1
    max_restarts: int = 10
    hang_timeout: float = 60.0
    rebalance: bool = False
    choice: Choice | None = None
    """How workers are laid out, where that is not flat."""
    expendable: frozenset[int] = frozenset()
    """The ranks without which the others go on, as they are, once all have met."""

    @property
    def most(self) -> int:
        """How many workers can have something to do."""
        split = self.choice.split if self.choice is not None else 1
        return self.shards * split + self.server_count

    @property
    def server_count(self) -> int:
        """How many workers serve the others; they are on the machine that leads."""
        return self.choice.servers if self.choice is not None else 0

    def usable(self, count: int) -> int:
        """Return how many of some workers the plan lays out: all of them, but where several share one replica (tp, pp)."""
        return self._mesh(count).workers if count > 0 else 0

    def fits(self, count: int, target: int) -> bool:
        """Return whether some workers can be laid out without any that holds more of a replica than was planned."""
        split = self.choice.split if self.choice is not None else 1
        return self.usable(count) == count and count >= min(split, target)

    def complete(self, places: set[int], size: int) -> set[int]:
        """Return those places of a group of some size whose replica is whole among the ones given."""
        mesh = self._mesh(size)
        inner = tuple(side for side, _ in mesh.sizes if side not in DATA)
        return {one for one in places if one < mesh.workers and {*mesh.members(one, *inner)} <= places}

    def hands(self, size: int) -> int:
        """Return how many of a group's workers data is dealt out to."""
        return self._mesh(size).size(*DATA)

    def owned(self, rank: int, size: int, shares: tuple[int, ...] | None) -> range:
        """Return the shards that a worker carries in a group of some size."""
        return owned_shards(self._mesh(size).index(rank, *DATA), self.hands(size), self.shards, shares)

    def servers(self, size: int) -> range:
        """Return the ranks of a group's servers: its last ones."""
        return range(self._mesh(size).trainers, size)

    def trainers(self, size: int) -> int:
        """Return how many of a group's workers train."""
        return size - len(self.servers(size))

    def layout(self, size: int) -> str:
        """Return how a group of some size is laid out, in words."""
        return str(self._mesh(size))

    def _mesh(self, size: int) -> Mesh:
        return Mesh.flat(size) if self.choice is None else self.choice.fitted(size)
