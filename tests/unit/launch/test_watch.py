"""When the watch over a group acts: on what a second look confirms, and never on a stall that it shared itself."""

import time

import pytest

from paceline.launch.health.diagnosis import HangWatch
from paceline.launch.health.watch import GroupWatch
from paceline.observe.verdict import WorkerEvidence
from paceline.world.status_page import OperationKind, Phase, Reading

TIMEOUT_S = 0.4


def reading(silent_s: float, phase: Phase = Phase.COMMUNICATION) -> Reading:
    then = time.monotonic() - silent_s
    return Reading(
        phase=phase,
        since=then,
        touched=then,
        operation=9,
        kind=OperationKind.STEP,
        step=8,
        batches=9,
        steps=8,
        data_s=0.1,
        compute_s=0.1,
        communication_s=0.1,
        longest_s=0.01,
    )


def look_at(readings):
    def look(watch: HangWatch) -> tuple[WorkerEvidence, ...]:
        now = time.monotonic()
        return tuple(
            WorkerEvidence(
                rank=rank, host="here", reading=one, silent_s=one.silence_s(now), limit_s=watch.limit_s(one)
            )
            for rank, one in readings.items()
        )

    return look


def found(watch, readings):
    return watch.find(readings, look_at(readings), {}, ()).verdict


def find_until(watch, readings, seconds):
    end = time.monotonic() + seconds
    while (verdict := found(watch, readings)) is None and time.monotonic() < end:
        time.sleep(TIMEOUT_S / 8)
    return verdict


@pytest.fixture
def watch():
    return GroupWatch(TIMEOUT_S)


def test_workers_that_come_out_of_a_shared_stall_are_no_deadlock(watch):
    assert found(watch, {rank: reading(5.0) for rank in range(4)}) is None
    assert found(watch, {0: reading(0.0), 1: reading(5.0), 2: reading(5.0), 3: reading(5.0)}) is None
    assert found(watch, {rank: reading(0.0) for rank in range(4)}) is None


def test_the_odd_one_out_of_a_shared_stall_is_not_replaced(watch):
    stalled = {0: reading(5.0), 1: reading(5.0, Phase.COMPUTE), 2: reading(5.0), 3: reading(5.0)}
    assert found(watch, stalled) is None
    assert found(watch, {**stalled, 1: reading(0.0)}) is None


def test_a_deadlock_that_lasts_is_one(watch):
    verdict = find_until(watch, {rank: reading(5.0) for rank in range(4)}, 20 * TIMEOUT_S)
    assert verdict is not None
    assert verdict.kind == "deadlock"


def test_one_that_goes_on_hanging_is_named(watch):
    verdict = find_until(watch, {0: reading(5.0), 1: reading(5.0, Phase.COMPUTE)}, 20 * TIMEOUT_S)
    assert verdict is not None
    assert (verdict.kind, verdict.stuck) == ("stuck", (1,))


def test_a_launcher_that_stood_still_itself_measures_anew(watch):
    assert found(watch, {rank: reading(0.0) for rank in range(2)}) is None
    time.sleep(2 * TIMEOUT_S)
    readings = {rank: reading(2 * TIMEOUT_S) for rank in range(2)}
    for _ in range(2):
        assert found(watch, readings) is None
        assert watch._suspected is None
