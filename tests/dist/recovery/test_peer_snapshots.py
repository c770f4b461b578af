"""Who keeps whose copy, where machines have different numbers of workers; and what a broken group does to it."""

import threading
import time
from dataclasses import replace

import torch

import paceline
from paceline.recovery.peer_snapshots import PeerSnapshots
from paceline.recovery.position import Position
from paceline.state.chunks import LocalState, TensorChunk

MACHINES = (0, 0, 0, 1, 1)
"""The machine of each rank."""


def neighbours(run):
    rank, world = run.world.rank, run.world
    here = MACHINES[rank]
    placed = replace(
        world,
        nodes=2,
        node_rank=here,
        local_rank=MACHINES[:rank].count(here),
        local_size=MACHINES.count(here),
    )
    copies = PeerSnapshots(every=1)
    copies.attach(placed)
    found = copies._to, copies._source
    copies.detach()
    return found


def test_every_copy_has_one_place_on_another_machine_where_that_can_be():
    found = paceline.launch(neighbours, workers=len(MACHINES))
    for rank, (to, _) in enumerate(found):
        assert found[to][1] == rank
    assert sorted(to for to, _ in found) == list(range(len(MACHINES)))
    # The larger machine has one worker too many to send it elsewhere.
    assert sum(MACHINES[rank] == MACHINES[to] for rank, (to, _) in enumerate(found)) == 1


def leave_midway(run):
    """Take a snapshot in a group that broke while the one before was on its way, and gloo has forgotten it."""
    copies = PeerSnapshots(every=1)
    copies.attach(run.world)
    run.world.comm.barrier()  # the other one has its connections: breaking the group would fail them
    part = LocalState({"model/weight": TensorChunk.whole(torch.ones(4))}, {"optimizer": {"state": {}}})
    if run.world.rank == 0:
        copies._thread = threading.Thread(target=time.sleep, args=(10,), daemon=True)
        copies._thread.start()
        run.world.interruption.interrupt()
        copies.take(Position(number=1), {}, part, anew=True)
    return sorted(copies.kept)


def test_none_is_taken_in_a_group_that_broke_and_nothing_is_raised():
    assert paceline.launch(leave_midway, workers=2) == ([], [])
