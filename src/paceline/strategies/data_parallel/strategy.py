"""`--strategy ddp`: which replica a worker gets."""

from __future__ import annotations

from paceline.strategies import compression
from paceline.strategies.base import BuiltInStrategy, Exactness, StrategyInputs
from paceline.strategies.buffers.batchnorm import synchronise
from paceline.strategies.data_parallel.ddp_reducer import DdpReducer
from paceline.strategies.placement import WholePlacement
from paceline.strategies.replica import Replica
from paceline.strategies.tuning import Tuning
from paceline.world import World


class Ddp(BuiltInStrategy):
    """Gradients summed over processes in buckets, while the backward pass goes on."""

    name = "ddp"

    def level(self, tuning: Tuning) -> Exactness:
        """Return what is left of the promise when gradients are made smaller on their way."""
        return compression.level(tuning.compress)

    def prepare(self, inputs: StrategyInputs, world: World) -> Replica:
        """Wrap the model; a world of one has nobody to sum with."""
        if inputs.sync_batchnorm:
            synchronise(inputs.model, world.comm, inputs.shards)
        if world.size == 1:
            return Replica(inputs, world, WholePlacement(inputs, world))
        equal = inputs.exactness is Exactness.BITWISE
        if inputs.tuning.shard_optimizer:
            from paceline.strategies.data_parallel.zero import DealtPlacement

            return Replica(
                inputs, world, DealtPlacement(inputs, world, equal=equal), DdpReducer(inputs, world)
            )
        placement = WholePlacement(inputs, world, equal=equal)
        return Replica(inputs, world, placement, DdpReducer(inputs, world))
