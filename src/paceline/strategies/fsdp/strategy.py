"""Weights, gradients and optimizer state sharded among the workers; alone (`fsdp`) or in several copies (`ddp=2,fsdp=2`)."""

from __future__ import annotations

from dataclasses import replace

from paceline.errors import InputError
from paceline.strategies.base import BuiltInStrategy, Exactness, StrategyInputs
from paceline.strategies.data_parallel.strategy import Ddp
from paceline.strategies.fsdp.placement import RowsPlacement
from paceline.strategies.fsdp.reducer import FsdpReducer, GatheringSchedule, is_exact
from paceline.strategies.fsdp.reduction import FsdpReduction
from paceline.strategies.memory.whole_draws import draw_whole
from paceline.strategies.replica import Replica
from paceline.strategies.tuning import Tuning
from paceline.world import World


class Fsdp(BuiltInStrategy):
    """Every worker keeps some rows of each parameter, and gathers a block's weights when they are needed."""

    name = "fsdp"

    def level(self, tuning: Tuning) -> Exactness:
        """Return the level that these options leave: weights gathered in fewer bits are other weights."""
        return self.exactness if tuning.fsdp_dtype == "fp32" else Exactness.NUMERIC

    def prepare(self, inputs: StrategyInputs, world: World) -> Replica:
        """Cut the model up; a world of one has nobody to share it with."""
        alone = world.size == 1 or (bool(world.mesh.sizes) and world.mesh.size("fsdp") == 1)
        if inputs.tuning.offload:
            _check_offload(inputs, world, alone=alone)
        if inputs.previous is not None and not inputs.can_rebuild:
            inputs.previous.placement.restore()
        if alone:
            return Ddp().prepare(inputs, world)
        if inputs.several:  # a turn goes through some of the models, and trains one
            inputs = replace(inputs, find_unused_parameters=True)
        draw_whole()
        placement, reducer, schedule = shard(inputs, world)
        return Replica(replace(inputs, previous=None, compile=False), world, placement, reducer, schedule)


def shard(inputs: StrategyInputs, world: World) -> tuple[RowsPlacement, FsdpReducer, GatheringSchedule]:
    """Cut a model up among the workers of a world, and make what computes with it."""
    data, place, copies = world.submesh("ddp", "fsdp"), world.submesh("fsdp"), world.submesh("ddp")
    exact = is_exact(inputs)
    reduction = FsdpReduction(data, place, copies, inputs.shards, exact=exact, transport=inputs.transport)
    placement = RowsPlacement(inputs, data, place, reduction, exact=exact)
    reducer = FsdpReducer(inputs, data, place, placement, reduction)
    return placement, reducer, GatheringSchedule(reduction, reducer.rounds)


def _check_offload(inputs: StrategyInputs, world: World, *, alone: bool) -> None:
    """Refuse to offload where that spares nothing; a run that has lost its other workers goes on without it."""
    if world.device.type == "cpu":
        raise InputError(
            "--offload needs an accelerator whose memory it spares, but the device is the CPU. Use --no-offload."
        )
    if alone and not inputs.weights_in_sync:
        raise InputError(
            "--offload keeps each worker's rows in host memory, but nothing is sharded among one worker. "
            "Use --workers 2 or more, or --no-offload."
        )
