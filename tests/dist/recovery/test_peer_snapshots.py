"""Who keeps whose copy, where machines have different numbers of workers."""

from dataclasses import replace

import paceline
from paceline.recovery.peer_snapshots import PeerSnapshots

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
