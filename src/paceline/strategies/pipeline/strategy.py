"""The layers split among the workers, the logical shards flowing through them as micro-batches.

Each worker of a pipeline holds one stage of the model or several, and computes for every shard just what one process would
compute there: activations and gradients pass with their true shapes, random streams go on from stage to stage, and each
stage sums its gradients over the shards along the canonical tree. So the bits are those of one process, whatever the schedule.

Where the model is cut is found at the first batch (`stages`); until then every worker holds the whole model in host memory.
"""

from __future__ import annotations

from paceline.data import owned_shards
from paceline.errors import InputError
from paceline.strategies.base import BuiltInStrategy, StrategyInputs
from paceline.strategies.pipeline.order import fewest
from paceline.strategies.pipeline.placement import StagePlacement
from paceline.strategies.pipeline.reducer import StageReducer
from paceline.strategies.pipeline.schedule import PipelineSchedule
from paceline.strategies.replica import Replica
from paceline.world import World


class Pipeline(BuiltInStrategy):
    """A pipeline of stages; beside `ddp` and `fsdp`, several pipelines that share the data."""

    name = "pp"

    def prepare(self, inputs: StrategyInputs, world: World) -> Replica:
        """Make one worker's end of a pipeline; a pipeline of one worker is none."""
        if world.mesh.size("pp") == 1:
            from paceline.strategies.fsdp.strategy import Fsdp  # which loads torch.distributed.fsdp

            return Fsdp().prepare(inputs, world)  # which is ddp where nobody shares parameters
        _check(inputs, world)
        world.note_transport()  # activations
        placement = StagePlacement(inputs, world)
        reducer = StageReducer(inputs, world, placement)
        schedule = PipelineSchedule(inputs.tuning.schedule, placement, reducer)
        return Replica(inputs, world, placement, reducer, schedule)


def _check(inputs: StrategyInputs, world: World) -> None:
    """Refuse what a pipeline cannot do, before anything is computed."""
    tuning, workers = inputs.tuning, world.mesh.size("pp")
    if inputs.precision.name == "fp16":
        raise InputError("--precision fp16 needs one scale for all stages, which pp does not keep. Use bf16.")
    if inputs.compile:
        raise InputError("--compile takes a model in one piece, and pp cuts it. Leave --compile out.")
    if inputs.sync_batchnorm:
        raise InputError(
            "--sync-batchnorm needs all shards at once, and pp takes one after the other. Leave it out."
        )
    if tuning.schedule == "zero-bubble" and tuning.activation_checkpointing == "selective":
        raise InputError(
            "--activation-checkpointing selective goes back through a block once, and zero-bubble does so twice. "
            "Use --activation-checkpointing blocks."
        )
    if tuning.schedule == "1f1b" and (tuning.stages_per_worker or 1) > 1:
        raise InputError(
            f"--schedule 1f1b holds one stage a worker, not {tuning.stages_per_worker}. Use --schedule interleaved."
        )
    places = world.dp_size
    shards = min(len(owned_shards(place, places, inputs.shards)) for place in range(places))
    needed = fewest(tuning.schedule, workers)
    if inputs.previous is None and shards < needed:
        raise InputError(
            f"--schedule {tuning.schedule} needs at least {needed} micro-batches for {workers} workers in a row, but a pipeline "
            f"has {shards} of the {inputs.shards} shards. Use --shards {needed * places} or more, or --schedule gpipe."
        )
