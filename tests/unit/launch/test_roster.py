"""Who has which place on a machine: a GPU belongs to one worker at a time."""

from paceline.launch.workers.roster import Roster


def test_a_replacement_gets_the_place_that_is_free_on_its_machine():
    roster = Roster()
    first = [roster.add(node, rank, slot=rank) for rank, node in enumerate([0, 0, 0, 0, 1, 1])]
    assert [one.local_rank for one in first] == [0, 1, 2, 3, 0, 1]
    first[1].running = first[4].running = False
    assert roster.add(0, None).local_rank == 1
    assert roster.add(1, None).local_rank == 0
    assert roster.add(0, None).local_rank == 4
