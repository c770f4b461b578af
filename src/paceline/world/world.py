"""`World`: who this worker is, where it computes, and whom it can talk to."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from paceline.world.base import Comm
from paceline.world.interruption import Interruption
from paceline.world.pulse import NoPulse


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """One worker's view of all the workers of one generation."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    node_rank: int
    nodes: int
    device: torch.device
    backend: str
    """What carries the tensors: "gloo", "cpu:gloo,cuda:nccl", or "local" in a world of one."""
    generation: int
    """Counts up each time the workers regroup after one died, left or joined."""
    host: str
    comm: Comm
    shares: tuple[int, ...] | None = None
    """How many shards each rank carries, where they are not dealt out evenly."""
    interruption: Interruption = field(default_factory=Interruption)
    """What ends every wait for the others, when one of them is gone."""
    pulse: NoPulse = field(default_factory=NoPulse)
    """Where this worker shows its launcher what it is at."""

    @property
    def is_first(self) -> bool:
        """Whether this worker speaks for all: rank 0."""
        return self.rank == 0

    def describe(self) -> str:
        """Say it in one line."""
        return (
            f"rank {self.rank} of {self.size} on {self.host} "
            f"(local rank {self.local_rank} of {self.local_size}, node {self.node_rank} of {self.nodes}), "
            f"{self.device}, {self.backend}, generation {self.generation}"
        )

    def close(self) -> None:
        """Leave the world; a second call does nothing."""
        self.comm.close()
