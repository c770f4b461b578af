"""Workers die, leave and join while a run trains: it ends with the bits of a run in which nothing happened."""

import json

import pytest

import paceline
from paceline.errors import InputError, WorkerFailedError
from tests.fault.survivors import STEPS, train


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The weights of one process that nothing happened to."""
    (result,) = paceline.launch(
        train, tmp_path_factory.mktemp("quiet"), strategy="single", shards=6, threads=1, device="cpu"
    )
    averages.append(result["average"])
    return result["weights"]


averages = []
"""What a moving average that the loop keeps beside the weights comes to, where nothing happens."""


def run(folder, faults, workers=3, **options):
    options = {"shards": 6, "device": "cpu", "out": folder / "run", **options}
    return paceline.launch(train, str(folder), faults, workers=workers, threads=1, **options)


def events(folder, kind):
    lines = (folder / "run" / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


POINTS = ("data", "forward", "backward", "reduction", "optimizer")


@pytest.mark.parametrize("transport", ["shm", "gloo"])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_worker_killed_anywhere_in_a_step_changes_nothing(rank, transport, tmp_path, undisturbed):
    faults = [(point, 3 + 4 * place, rank, "kill") for place, point in enumerate(POINTS)]
    results = run(tmp_path, faults, transport=transport)
    assert {result["weights"] for result in results} == {undisturbed}
    assert {result["average"] for result in results} == set(averages)
    assert len(events(tmp_path, "worker_lost")) == len(faults)
    # Each step is finished once, whoever was there; an event of it may be lost with a killed rank 0.
    finished = [event["step"] for event in events(tmp_path, "step")]
    assert len(finished) == len(set(finished))
    assert max(finished) == STEPS
    # What the tensors really travelled by, also after each regroup: with one worker left there is nothing to travel.
    way = {"shm": "shared memory", "gloo": "gloo"}[transport]
    told = [one["transport"] for kind in ("run_started", "regrouped") for one in events(tmp_path, kind)]
    assert set(told) <= {way, "none"}
    assert told[0] == way
    receipt = json.loads((tmp_path / "run" / "receipt.json").read_text())
    assert receipt["history"][0]["transport"] == way


def test_those_who_are_left_keep_their_processes(tmp_path, undisturbed):
    results = run(tmp_path, [("backward", 4, 1, "kill")], max_restarts=0)
    assert [result["weights"] for result in results] == [undisturbed] * 2
    assert [result["average"] for result in results] == averages * 2
    assert [result["size"] for result in results] == [2, 2]
    assert [change["workers"] for change in results[0]["recoveries"]] == [2]
    for result in results:
        assert sorted(set(result["given"])) == list(range(STEPS))
        assert len(result["given"]) <= STEPS + 1  # at most one step was given again


@pytest.mark.parametrize(
    "faults",
    [
        [("reduction", 5, 0, "kill"), ("reduction", 5, 1, "kill")],
        [("forward", 5, 1, "kill"), ("forward", 5, 2, "kill")],
        [("backward", 5, 1, "kill"), ("regroup", 5, 0, "kill")],
        [("backward", 5, 1, "kill"), ("regroup", 5, None, "kill")],
        [("backward", 5, 1, "exit"), ("reduction", 9, 0, "abort")],
        [("loop", 8, 0, "kill"), ("loop", 16, 1, "kill")],
    ],
    ids=[
        "rank 0 and another at once",
        "all but rank 0",
        "a kill, and another in the regroup",
        "a kill, and several in the regroup",
        "exit and abort",
        "around evaluations",
    ],
)
def test_several_faults(faults, tmp_path, undisturbed):
    results = run(tmp_path, faults)
    assert {result["weights"] for result in results} == {undisturbed}


def test_when_all_die_the_run_starts_over_from_its_last_checkpoint(tmp_path, undisturbed):
    results = run(tmp_path, [("forward", 13, None, "kill")], save_every="5")
    assert {result["weights"] for result in results} == {undisturbed}
    assert results[0]["given"][0] == 10
    assert "starting over from the last checkpoint" in events(tmp_path, "note")[0]["text"]


def test_they_are_as_many_as_before_also_where_one_was_replaced_that_left(tmp_path, undisturbed):
    results = run(tmp_path, [("loop", 4, 1, "notice"), ("forward", 13, None, "kill")], save_every="5")
    assert {result["weights"] for result in results} == {undisturbed}
    assert {result["size"] for result in results} == {3}


def test_the_fork_server_and_the_store_may_go_too(tmp_path, undisturbed):
    faults = [
        ("loop", 4, 1, "kill store"),
        ("loop", 8, 2, "kill"),
        ("loop", 14, 0, "kill fork server"),
    ]
    results = run(tmp_path, faults, save_every="6")
    assert {result["weights"] for result in results} == {undisturbed}
    assert results[0]["given"][0] == 12


def test_a_live_run_is_resized_up_and_down(tmp_path, undisturbed):
    faults = [("loop", 3, 0, "to 4"), ("loop", 9, 0, "to 1"), ("loop", 15, 0, "to 3")]
    results = run(tmp_path, faults, workers=2)
    assert {result["weights"] for result in results} == {undisturbed}


def test_a_worker_given_notice_leaves_at_a_step_and_is_replaced(tmp_path, undisturbed):
    results = run(tmp_path, [("loop", 4, 1, "notice")])
    assert {result["weights"] for result in results} == {undisturbed}
    assert not events(tmp_path, "worker_lost")
    assert "rank 1 leaves" in events(tmp_path, "regrouped")[0]["reason"]


def steps_with_fewer(changes, last=STEPS):
    """Count the steps that were finished while there were fewer than three: those who are left only end their body."""
    ends = [*(change["step"] for change in changes[1:]), last]
    return sum(
        end - change["step"] for change, end in zip(changes, ends, strict=False) if change["workers"] != 3
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_is_retried_in_its_place_and_the_others_wait(rank, tmp_path, undisturbed, capfd):
    faults = [
        ("forward", 6, rank, "raise"),
        ("metrics", 7, rank, "raise"),
        ("backward", 12, rank, "exit well"),
        ("loop", 14, rank, "leave well"),
        ("metrics", 15, 2, "raise"),
    ]
    results = run(tmp_path, faults)
    assert [result["weights"] for result in results] == [undisturbed] * 3
    assert all(steps_with_fewer(result["recoveries"]) == 0 for result in results)
    assert [result["given"][0] > 0 for result in results] == [one == rank for one in range(3)]
    told = events(tmp_path, "worker_lost")
    assert [(event["rank"], event["step"]) for event in told if event["trace"]] == [
        (rank, 6),
        (rank, 8),
        (2, 16),
    ]
    assert all("ValueError: a passing trouble" in event["trace"] for event in told if event["trace"])
    assert ["exited with status 0 before its part was done" in event["reason"] for event in told] == [
        False,
        False,
        True,
        True,
        False,
    ]
    assert capfd.readouterr().err.count("ValueError: a passing trouble") == 3


def test_a_worker_that_exits_in_an_evaluation_is_replaced_before_the_next_step(tmp_path, undisturbed):
    results = run(tmp_path, [("metrics", 7, 1, "exit"), ("metrics", 15, 0, "leave well")])
    assert [result["weights"] for result in results] == [undisturbed] * 3
    changes = [(change["workers"], change["step"]) for change in results[0]["recoveries"]]
    assert changes == [(2, 8), (3, 8), (2, 16), (3, 16)]


@pytest.mark.parametrize(
    ("where", "rank", "action", "times", "says"),
    [
        ("forward", 1, "raise", 2, "ValueError: a passing trouble"),
        ("forward", None, "raise", 1, "ValueError: a passing trouble"),
        ("metrics", 1, "raise", 2, "ValueError: a passing trouble"),
        ("metrics", None, "raise", 1, "ValueError: a passing trouble"),
        ("forward", 1, "exit well", 2, "exited with status 0 before its part was done"),
        ("loop", None, "leave well", 1, "exited with status 0 before its part was done"),
    ],
)
def test_what_comes_again_is_a_bug(where, rank, action, times, says, tmp_path):
    with pytest.raises(WorkerFailedError) as caught:
        run(tmp_path, [(where, 6, rank, action)] * times)
    assert says in caught.value.trace or says in str(caught.value)
    assert events(tmp_path, "run_failed")
    assert steps_with_fewer(events(tmp_path, "regrouped"), last=6) == 0


@pytest.mark.parametrize("options", [{"max_restarts": 0}, {"elastic": False}])
def test_an_exception_ends_a_run_in_which_nobody_may_be_replaced(options, tmp_path):
    with pytest.raises(WorkerFailedError) as caught:
        run(tmp_path, [("forward", 6, 1, "raise")], **options)
    assert "ValueError: a passing trouble" in caught.value.trace


def test_too_few_workers_are_the_end(tmp_path):
    with pytest.raises(WorkerFailedError, match=r"1 of at least 2 workers are left.*--max-restarts 0"):
        run(tmp_path, [("backward", 5, 1, "kill")], workers=2, min_workers=2, max_restarts=0)


def test_without_elasticity_the_first_loss_is_the_end(tmp_path):
    with pytest.raises(WorkerFailedError, match=r"rank 1 on .* was killed by SIGKILL"):
        run(tmp_path, [("backward", 5, 1, "kill")], elastic=False)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"min_workers": 4}, "min_workers is 4, but must be from 1 to the 3 workers"),
        ({"max_restarts": -1}, "max_restarts is -1, but must be at least 0"),
        ({"hang_timeout": 0.0}, "hang_timeout is 0, but must be above 0"),
    ],
)
def test_bad_input(options, words, tmp_path):
    with pytest.raises(InputError, match=words):
        run(tmp_path, [], **options)
