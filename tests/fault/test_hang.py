"""A worker that makes no progress is named, with the line it is at, and replaced; a slow one is named, and may carry less."""

import json
import re

import pytest

import paceline
from paceline.errors import WorkerFailedError
from tests.fault import survivors
from tests.fault.survivors import train


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The weights of one process that nothing happened to."""
    (result,) = paceline.launch(
        train, tmp_path_factory.mktemp("quiet"), strategy="single", shards=6, threads=1, device="cpu"
    )
    return result["weights"]


def run(folder, faults, workers=3, **options):
    kwargs = {name: options.pop(name) for name in ("steps", "slow") if name in options}
    options = {"shards": 6, "hang_timeout": 1.5, "device": "cpu", "out": folder / "run", **options}
    return paceline.launch(train, str(folder), faults, workers=workers, threads=1, kwargs=kwargs, **options)


def events(folder, kind):
    lines = (folder / "run" / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


@pytest.mark.parametrize(
    ("action", "words"),
    [
        ("stop", "rank 1 on HOST is stopped (SIGSTOP) in step 5, "),
        ("sleep", "rank 1 on HOST never entered the gradient reduction of step 5: "),
    ],
)
def test_a_worker_that_hangs_is_named_and_replaced(action, words, tmp_path, undisturbed):
    results = run(tmp_path, [("forward", 5, 1, action)])
    assert {result["weights"] for result in results} == {undisturbed}
    verdict = events(tmp_path, "note")[0]["text"]
    host = events(tmp_path, "worker_lost")[0]["host"]
    assert verdict.startswith(words.replace("HOST", host))
    assert "batches" in verdict
    assert action == "stop" or f"{survivors.__name__.rpartition('.')[2]}.py:" in verdict
    assert [event["rank"] for event in events(tmp_path, "worker_lost")] == [1]


@pytest.mark.parametrize("point", ["data", "forward", "metrics"])
def test_a_stall_that_all_share_is_reported_and_waited_for(point, tmp_path, undisturbed):
    results = run(tmp_path, [(point, 5, None, "stall")])
    assert [result["weights"] for result in results] == [undisturbed] * 3
    assert events(tmp_path, "worker_lost") == events(tmp_path, "regrouped") == []
    told = [note["text"] for note in events(tmp_path, "note")]
    assert told
    # One that came late on a busy machine is not among them yet.
    late = re.compile(r"ranks (0, 1 and 2|0 and 1|0 and 2|1 and 2) on ")
    assert all(late.match(text) and "nobody is replaced" in text for text in told), told


def test_a_worker_alone_that_stalls_keeps_what_it_has_done(tmp_path, undisturbed):
    (result,) = run(tmp_path, [("forward", 5, 0, "stall")], workers=1)
    assert result["weights"] == undisturbed
    assert events(tmp_path, "worker_lost") == []
    assert "nobody is replaced" in events(tmp_path, "note")[0]["text"]


def test_without_elasticity_the_verdict_is_the_end(tmp_path):
    with pytest.raises(WorkerFailedError, match=r"rank 0 on .* is stopped"):
        run(tmp_path, [("forward", 5, 0, "stop")], elastic=False)


def test_a_deadlock_of_all_is_told_apart_and_ends_the_run(tmp_path):
    with pytest.raises(WorkerFailedError, match="wait for each other in step 5"):
        run(tmp_path, [("loop", 5, None, "disagree")], transport="gloo")


def test_a_slow_worker_is_named_and_carries_less_with_the_same_bits(tmp_path):
    steps = 60
    (quiet,) = paceline.launch(
        train, tmp_path / "run", kwargs={"steps": steps}, strategy="single", shards=6, threads=1, device="cpu"
    )
    results = run(tmp_path, [], workers=2, steps=steps, slow=1, rebalance=True, hang_timeout=60.0)
    assert {result["weights"] for result in results} == {quiet["weights"]}
    slow = events(tmp_path, "straggling")[0]
    assert (slow["rank"], slow["waits_for"]) == (1, "compute")
    assert slow["times"] > 1.5
    assert "shards are rebalanced" in {event["reason"] for event in events(tmp_path, "regrouped")}
    receipt = json.loads((tmp_path / "run" / "receipt.json").read_text())
    dealt = [start["shares"] for start in receipt["history"] if start.get("shares")]
    assert dealt
    assert all(mine[0] > mine[1] for mine in dealt)
