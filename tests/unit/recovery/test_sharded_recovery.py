"""What a worker brings of the state that a new group has agreed on."""

import torch

from paceline.recovery import departing_state
from paceline.recovery.handover import CHECKPOINT, SNAPSHOTS, WORKERS, StateSource
from paceline.recovery.options import RecoveryOptions
from paceline.recovery.position import Position
from paceline.recovery.sharded_recovery import ShardedRecovery
from paceline.state.chunks import LocalState, TensorChunk
from paceline.strategies.catalogue import choice

HERE = Position(number=4)
EXTRA = {"optimizer": {"groups": [], "state": {}}}


def state(value):
    return LocalState({"model/weight": TensorChunk.whole(torch.full((2,), value))}, EXTRA)


def test_what_a_departed_worker_left_is_of_the_workers_state_and_of_no_snapshot(tmp_path):
    options = RecoveryOptions(
        choice=choice("fsdp"),
        backend="gloo",
        check_collectives=False,
        staleness=0,
        shard_optimizer=False,
        snapshot_every=2,
        out=tmp_path,
    )
    recovery = ShardedRecovery(options)
    departing_state.write(tmp_path, HERE, state(1.0))
    recovery.inventory(4, HERE, None, None)

    def brought(kind, *, rank, held=None):
        chunks, extra_state = recovery.brought(StateSource(kind, HERE, (1,)), rank, held)
        return [one["model/weight"].values.tolist() for one in chunks], extra_state is not None

    # A snapshot of the same step may have come before the loop changed something.
    assert brought(SNAPSHOTS, rank=0) == ([], False)
    assert brought(CHECKPOINT, rank=0) == ([], False)
    assert brought(WORKERS, rank=0) == ([[1.0, 1.0]], False)
    assert brought(WORKERS, rank=1, held=state(2.0)) == ([[2.0, 2.0], [1.0, 1.0]], True)
    assert brought(SNAPSHOTS, rank=1, held=state(2.0)) == ([], False)
