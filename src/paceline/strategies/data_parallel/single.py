"""One process, one device: the reference that all else is measured against."""

from __future__ import annotations

from paceline.errors import InputError
from paceline.strategies.base import BuiltInStrategy, StrategyInputs
from paceline.strategies.buffers.batchnorm import synchronise
from paceline.strategies.placement import WholePlacement
from paceline.strategies.replica import Replica
from paceline.world import World


class Single(BuiltInStrategy):
    """Every shard in turn, in one process."""

    name = "single"

    def prepare(self, inputs: StrategyInputs, world: World) -> Replica:
        """Place the model on the one device."""
        if world.size > 1:
            raise InputError(
                f"--strategy single is one process, but {world.size} workers were asked for. Use ddp."
            )
        if inputs.sync_batchnorm:
            synchronise(inputs.model, world.comm, inputs.shards)
        return Replica(inputs, world, WholePlacement(inputs, world))
