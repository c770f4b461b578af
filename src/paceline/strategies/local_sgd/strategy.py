"""Workers step alone and average their weights now and then: local SGD, and DiLoCo with `--outer-optimizer nesterov`.

A step goes over this worker's shards only: their gradient over their own weight, clipped by its own norm, through this
worker's own optimizer. Only two numbers travel, so the loss of every step is exact over the whole global batch (the
gradient norm is this worker's). After every `--local-steps` steps the parameters become their mean, each worker counting
for the weight it has learned from since the last one, and buffers what their rules say. So with plain SGD and one local
step the answer is ddp's up to rounding; it is ddp's to the bit in the first `--local-warmup` steps, which are taken
together, and one process's to the bit on one worker without an outer optimizer.

`--outer-optimizer nesterov` takes the mean change since the last average as the gradient of an SGD with Nesterov momentum. That
momentum is part of the state, as the slot `outer_momentum` of each parameter.

An evaluation, a checkpoint and a new group end the period early: they average first, a checkpoint the optimizers' state
too, so that one state can be saved and any number of workers go on from it. What a lost worker had learned since the last
average is lost with it, and whoever was a step behind takes over the weights of one that was ahead.
"""

from __future__ import annotations

from paceline.errors import InputError
from paceline.strategies.base import BuiltInStrategy, Exactness, StrategyInputs
from paceline.strategies.guards.overlaps import refuse_overlaps
from paceline.strategies.guards.refusals import refuse_sparse
from paceline.strategies.local_sgd.placement import DriftingPlacement
from paceline.strategies.local_sgd.reducer import OwnReducer
from paceline.strategies.placement import WholePlacement
from paceline.strategies.replica import Replica
from paceline.world import World


class LocalSgd(BuiltInStrategy):
    """Steps alone, averages now and then."""

    name = "local-sgd"
    exactness = Exactness.STATISTICAL

    def prepare(self, inputs: StrategyInputs, world: World) -> Replica:
        """Make a replica that averages; one that has nobody to average with is one process."""
        if inputs.precision.name == "fp16":
            raise InputError(
                "--precision fp16 needs a loss scaler that all workers share, and --strategy local-sgd has none. Use bf16."
            )
        if inputs.sync_batchnorm:
            raise InputError(
                "--sync-batchnorm needs the samples of all workers in each step, and --strategy local-sgd takes steps alone. "
                "Use --strategy ddp."
            )
        alone = world.size == 1 and inputs.tuning.outer_optimizer == "average"
        if alone:
            return Replica(inputs, world, WholePlacement(inputs, world))
        refuse_sparse(inputs.model, "local-sgd")
        refuse_overlaps(inputs.model)
        placement = DriftingPlacement(inputs, world)
        return Replica(inputs, world, placement, OwnReducer(inputs, world, placement))
