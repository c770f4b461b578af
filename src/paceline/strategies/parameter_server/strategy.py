"""Parameters on servers, each with the optimizer of its part: `--strategy ps --workers 2 --servers 1`.

Servers are the last ranks of the world. A trainer computes the gradients of its shards, pushes to each server those of the
server's parameters, and gets the new weights in the answer.

With `--staleness 0` a server waits for all trainers, adds what they brought along the tree over the shards, divides by the
true weight, clips by the true norm and updates: the bits are those of one process.

With `--staleness s` a server applies what a trainer brings as soon as it comes, and a trainer may be up to s steps ahead of
the slowest. A share's gradient is the mean over its own weight, clipped by its own norm, and moves the parameters by the
learning rate times its part of the global batch: so the shares of one global batch together go as far as one step. Shares
that wait while a server is busy are taken together as the one update of their weighted mean. Which shares meet is a matter
of time, so the level is statistical; evaluations and checkpoints see all shares of all steps before them.
"""

from __future__ import annotations

from paceline.errors import InputError
from paceline.strategies.base import BuiltInStrategy, Exactness, StrategyInputs
from paceline.strategies.guards.refusals import refuse_sparse
from paceline.strategies.parameter_server.async_server import AsyncUpdate
from paceline.strategies.parameter_server.server import ServerPlacement
from paceline.strategies.parameter_server.sync_server import SyncReducer
from paceline.strategies.parameter_server.trainer import ServedPlacement, ServedReducer, ServedUpdate
from paceline.strategies.placement import WholePlacement
from paceline.strategies.replica import Replica
from paceline.strategies.tuning import Tuning
from paceline.world import World
from paceline.world.world import CALLS


class ParameterServer(BuiltInStrategy):
    """Trainers push gradients and pull weights; servers hold the parameters."""

    name = "ps"

    def level(self, tuning: Tuning) -> Exactness:
        """Return what is left of the promise when trainers do not wait for each other."""
        return Exactness.STATISTICAL if tuning.staleness else Exactness.BITWISE

    def prepare(self, inputs: StrategyInputs, world: World) -> Replica:
        """Make a trainer or a server; one that is left alone needs no server."""
        if inputs.precision.name == "fp16":
            raise InputError(
                "--precision fp16 needs a loss scaler that all workers share, and --strategy ps has none. Use bf16."
            )
        if inputs.sync_batchnorm:
            raise InputError(
                "--sync-batchnorm needs the workers to meet in the middle of a step, and those of --strategy ps meet at its "
                "end. Use --strategy ddp."
            )
        if not world.mesh.servers:
            return Replica(inputs, world, WholePlacement(inputs, world))
        refuse_sparse(inputs.model, "ps")
        world.note_transport(CALLS)
        if not world.serves:
            served = ServedPlacement(inputs, world)
            return Replica(inputs, world, served, ServedReducer(served.peers), update=ServedUpdate(served))
        placement = ServerPlacement(inputs, world)
        if inputs.tuning.staleness:
            return Replica(inputs, world, placement, update=AsyncUpdate(placement))
        return Replica(inputs, world, placement, SyncReducer(inputs, world, placement))
