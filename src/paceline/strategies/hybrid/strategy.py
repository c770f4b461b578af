"""The strategy hybrid: what is dense under ddp, tables with sparse gradients on servers; only touched rows travel."""

from __future__ import annotations

from paceline.errors import InputError
from paceline.strategies import sparse
from paceline.strategies.base import Exactness, OpenReplica, StrategyInputs
from paceline.strategies.batchnorm import synchronise
from paceline.strategies.data_parallel.strategy import Ddp
from paceline.strategies.hybrid.server import ServerReplica
from paceline.strategies.hybrid.tables import bring_back, check
from paceline.strategies.hybrid.trainer import LoneTrainer, Trainer
from paceline.strategies.tuning import Tuning
from paceline.world import World
from paceline.world.world import RPC


class Hybrid:
    """Trainers and servers; the sums of both are those of one process."""

    name = "hybrid"
    exactness = Exactness.BITWISE
    threaded = False

    def level(self, tuning: Tuning) -> Exactness:  # noqa: ARG002
        """Return its own level: no tuning changes it."""
        return self.exactness

    def prepare(self, parts: StrategyInputs, world: World) -> OpenReplica:
        """Place the tables on the servers and the rest on the trainers."""
        check(parts.model)
        if not world.mesh.servers:  # nobody is left beside this worker, or it has yet to join the others
            bring_back(parts.model)
            return Ddp().prepare(parts, world)
        if parts.compile or parts.precision.scaler() is not None:
            asked = "--compile" if parts.compile else "--precision fp16"
            raise InputError(
                f"{asked} cannot reach what servers do with a step of --strategy hybrid. Leave it out, or use ddp."
            )
        world.note_transport(RPC)
        group = world.along("ddp")
        if not parts.agreed:
            for parameter in sparse.sparse_parameters(parts.model):
                parameter.data.copy_(world.comm.broadcast(parameter.data.to(world.device)))
        if world.serves:
            return ServerReplica(parts, world)
        if parts.sync_batchnorm:
            synchronise(parts.model, group.comm, parts.shards)
        return (Trainer if group.size > 1 else LoneTrainer)(parts, world, group)
