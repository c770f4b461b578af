"""`--strategy ddp`: which replica a worker gets."""

from __future__ import annotations

from paceline.strategies import compression
from paceline.strategies.base import Exactness, OpenReplica, StrategyInputs
from paceline.strategies.batchnorm import synchronise
from paceline.strategies.data_parallel.ddp import DdpReplica
from paceline.strategies.sequential import SequentialReplica
from paceline.strategies.tuning import Tuning
from paceline.world import World


class Ddp:
    """Gradients summed over processes in buckets, while the backward pass goes on."""

    name = "ddp"
    exactness = Exactness.BITWISE
    threaded = False

    def level(self, tuning: Tuning) -> Exactness:
        """Return what is left of the promise when gradients are made smaller on their way."""
        return compression.level(tuning.compress)

    def prepare(self, parts: StrategyInputs, world: World) -> OpenReplica:
        """Wrap the model; a world of one has nobody to sum with."""
        if parts.sync_batchnorm:
            synchronise(parts.model, world.comm, parts.shards)
        if world.size == 1:
            return SequentialReplica(parts, world)
        if parts.tuning.shard_optimizer:
            from paceline.strategies.data_parallel.zero import (
                ZeroReplica,  # loads torch.distributed.checkpoint
            )

            return ZeroReplica(parts, world)
        return DdpReplica(parts, world)
