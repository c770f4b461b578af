"""Weights, gradients and optimizer state cut up among the workers; alone (`fsdp`) or in several copies (`ddp=2,fsdp=2`)."""

from __future__ import annotations

from paceline.errors import InputError
from paceline.strategies.base import Exactness, OpenReplica, StrategyInputs
from paceline.strategies.batchnorm import synchronise
from paceline.strategies.data_parallel.strategy import Ddp
from paceline.strategies.fsdp.replica import FsdpReplica
from paceline.strategies.fsdp.unwrapping import unwrap_model
from paceline.strategies.sequential import SequentialReplica
from paceline.strategies.tuning import Tuning
from paceline.strategies.whole_draws import draw_whole
from paceline.world import World


class Fsdp:
    """Every worker keeps some rows of each parameter, and gathers a block's weights when they are needed."""

    name = "fsdp"
    exactness = Exactness.BITWISE
    threaded = False

    def level(self, tuning: Tuning) -> Exactness:
        """Return the level that these options leave: weights gathered in fewer bits are other weights."""
        return self.exactness if tuning.fsdp_dtype == "fp32" else Exactness.NUMERIC

    def prepare(self, parts: StrategyInputs, world: World) -> OpenReplica:
        """Cut the model up; a world of one has nobody to share it with."""
        if parts.tuning.offload:
            _check_offload(parts, world)
        if isinstance(parts.kept, FsdpReplica) and not parts.remakes:
            if parts.kept.local.host is not None:
                parts.kept.local.host.release()
            unwrap_model(parts.kept.model, parts.kept.optimizer, parts.kept.local)
        if world.size == 1:
            if parts.sync_batchnorm:
                synchronise(parts.model, world.comm, parts.shards)
            return SequentialReplica(parts, world)
        if world.mesh.sizes and world.mesh.size("fsdp") == 1:
            return Ddp().prepare(parts, world)
        draw_whole()
        return FsdpReplica(parts, world)


def _check_offload(parts: StrategyInputs, world: World) -> None:
    """Refuse to offload where that spares nothing; a run that has lost its other workers goes on without it."""
    if world.device.type == "cpu":
        raise InputError(
            "--offload needs an accelerator whose memory it spares, but the device is the CPU. Use --no-offload."
        )
    alone = world.size == 1 or (bool(world.mesh.sizes) and world.mesh.size("fsdp") == 1)
    if alone and not parts.agreed:
        raise InputError(
            "--offload keeps each worker's rows in host memory, but nothing is cut up among one worker. "
            "Use --workers 2 or more, or --no-offload."
        )
