"""What recovery is told of how a run is to be done."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from paceline.strategies import Choice, is_sharded
from paceline.world import World


@dataclass(frozen=True, kw_only=True)
class RecoveryOptions:
    """How groups are formed, and what is kept for the case that one breaks."""

    choice: Choice
    """The strategy that was asked for: each group is laid out as near to it as its workers reach."""
    backend: str
    check_collectives: bool
    staleness: int
    """How many steps workers may be apart."""
    shard_optimizer: bool
    snapshot_every: int | None
    """Steps from one peer snapshot to the next; None where none are taken."""
    out: Path | None
    """The run folder."""

    def laid_out(self, world: World) -> World:
        """Return a world with the mesh that its workers make up."""
        return replace(world, mesh=self.choice.fitted(world.size), apart=self.staleness)

    def shards_state(self, world: World) -> bool:
        """Return whether a group's workers will each hold only a part."""
        return is_sharded(self.choice, world.mesh) or (self.shard_optimizer and world.size > 1)
