"""Several machines, without any: who works where, what is compared, what travels."""

import math
from pathlib import Path

import pytest

from paceline.errors import InputError
from paceline.launch.failures import WorkerFailure
from paceline.launch.nodes import machines, travel
from paceline.launch.nodes.inventory import LEADER, Node, Nodes
from paceline.launch.workers.roster import Roster
from paceline.observe.verdict import Collective, Frame, WorkerEvidence
from paceline.training.options import RunOptions
from paceline.world.status_page import OperationKind, Phase, Reading

READING = Reading(
    phase=Phase.DATA,
    since=100.0,
    touched=101.0,
    operation=3,
    kind=OperationKind.STEP,
    step=7,
    batches=8,
    steps=6,
    data_s=0.5,
    compute_s=1.5,
    communication_s=0.25,
    longest_s=0.125,
)


def sites(*wanted):
    made = Nodes(Node(LEADER, "a", None, "10.0.0.1", wanted[0]))
    for index, count in enumerate(wanted[1:], 1):
        made.add(Node(index, f"host{index}", None, "10.0.0.1", count))
    return made


def test_a_lost_worker_is_replaced_on_its_own_machine():
    made = sites(2, 2, 2)
    assert made.place({0: 2, 1: 1, 2: 2}).index == 1
    assert made.place({0: 1, 1: 1, 2: 0}).index == 2
    assert made.wanted == 6


def test_a_worker_more_than_wanted_goes_where_fewest_are():
    made = sites(2, 1)
    assert made.place({0: 2, 1: 1}).index == 1
    assert [node.wanted for node in made] == [2, 2]


def test_what_a_machine_was_to_have_goes_with_it():
    made = sites(2, 3)
    made.drop(1)
    assert made.wanted == 2
    assert made.get(1) is None
    assert made.drop(1) is None


def test_a_smaller_run_wants_what_stays_of_each_machine():
    made = sites(2, 2)
    made.keep({0: 2, 1: 1})
    assert [node.wanted for node in made] == [2, 1]


def test_numbers_are_never_used_again_and_logs_are():
    roster = Roster()
    first = [roster.add(node, rank=rank, slot=rank) for rank, node in enumerate((0, 0, 1))]
    first[1].running = False
    again = roster.add(0, rank=None)
    assert (again.number, again.slot, again.rank) == (3, 1, -1)
    assert roster.counts() == {0: 2, 1: 1}
    roster.clear()
    assert roster.add(0, rank=0, slot=0).number == 4


def test_a_reading_keeps_its_age_on_a_machine_with_another_clock():
    packed = travel.pack_reading(READING, now=110.0)
    there = travel.unpack_reading(packed, now=5000.0)
    assert there.silence_s(5000.0) == READING.silence_s(110.0) == 9.0
    assert (there.phase, there.kind) == (Phase.DATA, OperationKind.STEP)
    # However long it takes on the way: only its own machine can say that it was silent meanwhile.
    assert travel.unpack_reading(packed, now=6000.0).silence_s(6000.0) == 9.0


def test_evidence_and_failures_survive_the_journey():
    frames = ((Frame("task.py", 12, "loss"), Frame("run.py", 3, "main")), (Frame("x.py", 1, "f"),))
    evidence = WorkerEvidence(
        rank=3,
        host="b",
        reading=READING,
        silent_s=4.5,
        limit_s=3.0,
        state="T",
        threads=frames,
        pending=(Collective(9, "all_reduce"),),
    )
    assert travel.unpack_evidence(travel.pack_evidence(evidence)) == evidence
    failure = WorkerFailure(
        rank=1, host="b", kind="code", message="ValueError: no", trace="Traceback", step=4
    )
    assert travel.unpack_said("failure", travel.pack_said("failure", failure)) == failure


@pytest.mark.parametrize("value", [object(), {"loss": math.nan}, "x" * (travel.LARGEST_RESULT + 1)])
def test_a_result_that_is_not_small_and_plain_stays_where_it_is(value):
    assert travel.pack_said("result", value) is None
    assert travel.pack_said("result", {"steps": 3}) == {"steps": 3}


def test_what_the_machines_compare(tmp_path):
    task = tmp_path / "task.py"
    task.write_text("one")
    record = {
        "task": f"{task}:Small",
        "name": "Small",
        "settings": {"lr": "0.1"},
        "threads": None,
        "steps": 9,
    }
    options = RunOptions(workers=2, nodes="2", rendezvous="a:1", out=tmp_path, micro_batch=4)
    there = RunOptions(
        workers=2, nodes="2", rendezvous="a:1", out=Path("elsewhere"), micro_batch=4, sink="csv"
    )
    facts = machines.agreed("paceline.training.trainer:main", options, record)
    assert facts == machines.agreed("paceline.training.trainer:main", there, record)
    assert (facts["--set lr"], facts["micro-batch"], facts["steps"], facts["program"]) == (
        "0.1",
        "4",
        "9",
        "Small",
    )
    assert str(tmp_path) not in str(facts)
    task.write_text("another")
    changed = machines.agreed("paceline.training.trainer:main", options, record)
    assert [name for name in facts if facts[name] != changed[name]] == ["the source of task.py"]


def test_a_machine_is_given_up_after_the_time_asked_for():
    assert machines.meeting("a:1", "1:2", join_timeout=9, machine_timeout=16).silence_s == 16
    assert machines.meeting(None, "1", join_timeout=9, machine_timeout=16) is None


@pytest.mark.parametrize(
    ("endpoint", "nodes", "join_timeout", "message"),
    [
        (None, "2", 9, "--nodes 2 machines need a place to meet"),
        (None, "0", 9, "--nodes 0 is no number of machines"),
        ("a:1", "2", 0, "--join-timeout is 0, but must be above 0"),
    ],
)
def test_meetings_that_cannot_be(endpoint, nodes, join_timeout, message):
    with pytest.raises(InputError, match=message):
        machines.meeting(endpoint, nodes, join_timeout=join_timeout, machine_timeout=15)


def test_calls_are_not_taken_on_the_loopback_interface_where_machines_meet_elsewhere():
    there = machines.meeting("10.0.0.1:1", "2", join_timeout=9, machine_timeout=15)
    with pytest.raises(InputError, match="--interface lo takes calls of this machine only"):
        machines.taken("lo", there)
    assert machines.taken(None, None) == machines.taken("lo", None) == "lo"


def test_workers_are_dealt_out_to_a_number_of_machines_that_stays():
    def share(workers, nodes):
        return machines.share(workers, machines.meeting("a:1", nodes, join_timeout=9, machine_timeout=15))

    assert machines.share(5, None) == 5
    assert [share(workers, "3") for workers in (3, 4, 5, 6)] == [1, 2, 2, 2]
    with pytest.raises(InputError, match="2 workers leave some of 3 machines with nothing to do"):
        share(2, "3")
    with pytest.raises(InputError, match="--nodes 1:2 may change"):
        share(2, "1:2")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": "two", "rendezvous": "a:1"}, "--nodes two is no number of machines"),
        ({"nodes": "0", "rendezvous": "a:1"}, "--nodes 0 is no number of machines"),
        ({"nodes": "2", "rendezvous": "a:1", "strategy": "single"}, "--strategy single is one process"),
        ({"nodes": "2", "rendezvous": "a:1", "machine_timeout": 3}, "--machine-timeout is 3"),
        ({"nodes": "2", "rendezvous": "a:1", "workers": 2, "shards": 3}, "4 workers for 3 shards"),
        ({"nodes": "2", "rendezvous": "a:1", "workers": 2, "min_workers": 5}, "from 1 to the 4 workers"),
    ],
)
def test_options_that_make_no_run_on_several_machines(options, message):
    with pytest.raises(InputError, match=message):
        RunOptions(**options)


def test_shards_are_one_for_each_worker_of_all_machines():
    assert RunOptions(workers=3, nodes="1:4", rendezvous="a:1").total_shards == 12
