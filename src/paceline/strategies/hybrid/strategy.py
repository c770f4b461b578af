"""The strategy hybrid: what is dense under ddp, tables with sparse gradients on servers; only touched rows travel."""

from __future__ import annotations

from dataclasses import replace

from paceline.errors import InputError
from paceline.strategies import sparse
from paceline.strategies.base import BuiltInStrategy, StrategyInputs
from paceline.strategies.buffers.batchnorm import synchronise
from paceline.strategies.data_parallel.ddp_reducer import DdpReducer
from paceline.strategies.data_parallel.strategy import Ddp
from paceline.strategies.guards.overlaps import refuse_overlaps
from paceline.strategies.hybrid.kept import checked
from paceline.strategies.hybrid.server import TablesPlacement, TablesUpdate
from paceline.strategies.hybrid.tables import bring_back, check
from paceline.strategies.hybrid.trainer import DensePlacement, PushedRows, ServedRowsReducer
from paceline.strategies.placement import spread_weights
from paceline.strategies.reducer import Reducer
from paceline.strategies.replica import Replica
from paceline.world import World
from paceline.world.world import CALLS


class Hybrid(BuiltInStrategy):
    """Trainers and servers; the sums of both are those of one process."""

    name = "hybrid"

    def prepare(self, inputs: StrategyInputs, world: World) -> Replica:
        """Place the tables on the servers and the rest on the trainers."""
        check(inputs.model)
        if not world.mesh.servers:  # nobody is left beside this worker, or it has yet to join the others
            bring_back(inputs.model)
            return Ddp().prepare(inputs, world)
        if inputs.compile or inputs.precision.scaler() is not None:
            asked = "--compile" if inputs.compile else "--precision fp16"
            raise InputError(
                f"{asked} cannot reach what servers do with a step of --strategy hybrid. Leave it out, or use ddp."
            )
        refuse_overlaps(inputs.model)
        world.note_transport(CALLS)
        group = world.submesh("ddp")
        if not inputs.weights_in_sync:
            spread_weights(sparse.sparse_parameters(inputs.model), world)
        if world.serves:
            tables = TablesPlacement(inputs, world)
            served = replace(inputs, make_optimizer=lambda model: checked(inputs.make_optimizer(model)))
            return Replica(served, world, tables, update=TablesUpdate(tables))
        if inputs.sync_batchnorm:
            synchronise(inputs.model, group.comm, inputs.shards)
        dense = DensePlacement(inputs, world, group)
        inner = DdpReducer(inputs, group, PushedRows(dense)) if group.size > 1 else Reducer(group)
        return Replica(inputs, world, dense, ServedRowsReducer(dense, inner))
