"""The plan of a chaos run: the same from the same seed, and every fault of it can go off."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import InputError
from paceline.verify.chaos.faults import (
    BREAKING,
    DISK,
    FREEZE,
    JOIN,
    KILL,
    KINDS,
    LATE,
    PIPE,
    SLOW,
    STOP,
    Fault,
    points_of,
)
from paceline.verify.chaos.plan import USUAL_POINTS, FaultPlan, PlanRequest, make_plan
from paceline.world.fault_points import CHECKPOINT, DATA, EVALUATION, POINTS, REGROUP

USUAL: dict[str, Any] = {"faults": 20, "steps": 220, "workers": 4, "shards": 6}


@st.composite
def requests(draw: st.DrawFn) -> PlanRequest:
    """Everything that may be asked for."""
    faults = draw(st.integers(1, 40))
    workers = draw(st.integers(2, 5))
    points = draw(st.sets(st.sampled_from(POINTS), min_size=1).filter(lambda some: some != {REGROUP}))
    able = sorted(kind for kind in KINDS if set(points_of(kind)) & points)
    return PlanRequest(
        faults=faults,
        steps=draw(st.integers(2 * faults + 2, 20 * faults + 2)),
        workers=workers,
        shards=draw(st.integers(workers, 8)),
        seed=draw(st.integers(0, 1000)),
        kinds=tuple(draw(st.sets(st.sampled_from(able), min_size=1))),
        points=tuple(points),
    )


@given(requests())
def test_what_is_asked_for_is_planned_in_equal_parts(request: PlanRequest) -> None:
    plan = make_plan(request)
    assert [fault.number for fault in plan.faults] == list(range(request.faults))
    assert [fault.step for fault in plan.faults] == sorted(fault.step for fault in plan.faults)
    counts = Counter(fault.kind for fault in plan.faults)
    assert max(counts.values()) - min(counts.values()) <= 1
    assert set(counts) <= set(request.kinds)
    for fault in plan.faults:
        assert fault.point in request.points
        assert fault.point in points_of(fault.kind)
        assert 0 <= fault.rank < request.workers
        assert (0 < fault.seconds < request.hang_timeout) == (fault.kind == SLOW)
        assert (fault.seconds > request.hang_timeout) == (fault.kind in (LATE, FREEZE, PIPE))


@given(requests())
def test_every_fault_has_a_step_in_which_its_point_comes(request: PlanRequest) -> None:
    plan = make_plan(request)
    for fault in plan.faults:
        assert 1 <= fault.step < request.steps
        if fault.point == CHECKPOINT:
            assert (fault.step % plan.save_every, fault.rank) == (0, 0)
        elif fault.point == REGROUP:
            assert fault.after is not None
            lead = plan.faults[fault.after]
            assert (lead.number < fault.number, lead.kind in BREAKING, lead.point != REGROUP) == (True,) * 3
            # With nobody left there is no regroup; only where two shards allow no other number it is risked.
            if lead.kind in (KILL, STOP) and request.shards > 2:
                assert plan.workers_at(lead.step) > 1
    full = [fault.step for fault in plan.faults if fault.kind == DISK]
    if len(full) <= (request.steps - 1) // plan.save_every:
        assert len(set(full)) == len(full)  # a checkpoint that failed is not tried again in its step


@given(requests())
def test_joins_go_to_another_number_and_back(request: PlanRequest) -> None:
    asked = [fault.workers for fault in make_plan(request).faults if fault.kind == JOIN]
    assert all(number == request.workers for number in asked[1::2])
    assert all(1 <= number <= request.shards and number != request.workers for number in asked[::2])


def test_a_seed_gives_the_same_plan_and_another_seed_another() -> None:
    plan = make_plan(PlanRequest(**USUAL, seed=7))
    assert plan == make_plan(PlanRequest(**USUAL, seed=7))
    assert plan.faults != make_plan(PlanRequest(**USUAL, seed=8)).faults


def test_twenty_faults_are_of_every_kind_at_every_point_and_some_at_once() -> None:
    for seed in range(20):
        faults = make_plan(PlanRequest(**USUAL, seed=seed)).faults
        assert {fault.kind for fault in faults} == set(KINDS)
        together = Counter((fault.step, fault.point) for fault in faults if fault.point != CHECKPOINT)
        assert 2 in together.values()
        assert any(fault.point == REGROUP for fault in faults)
    many = [fault for seed in range(5) for fault in make_plan(PlanRequest(**USUAL, seed=seed)).faults]
    assert {fault.point for fault in many} == set(USUAL_POINTS)
    (one,) = make_plan(PlanRequest(**{**USUAL, "faults": 1}, kinds=(KILL,), points=(EVALUATION,))).faults
    assert (one.kind, one.point) == (KILL, EVALUATION)


def test_how_many_workers_there_should_be() -> None:
    joins = (
        Fault(number=0, kind=JOIN, point=DATA, step=3, workers=2),
        Fault(number=1, kind=JOIN, point=DATA, step=9, workers=4),
    )
    plan = FaultPlan(faults=joins, steps=20, workers=4, save_every=5)
    assert [plan.workers_at(step) for step in (0, 2, 3, 8, 9, 19)] == [4, 4, 2, 2, 4, 4]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"faults": 0}, "--faults is 0, but must be at least 1"),
        ({"kinds": ("kil",)}, "unknown kind of fault 'kil'. Did you mean 'kill'"),
        ({"kinds": ()}, "no kind of fault is given"),
        ({"points": ("bakward",)}, "unknown point 'bakward'. Did you mean 'backward'"),
        ({"points": ("regroup",), "kinds": ("kill",)}, "a fault in the regroup needs another"),
        ({"points": ("data",), "kinds": ("disk",)}, "of the kind disk goes off at checkpoint"),
        ({"steps": 41}, "20 faults do not fit into 41 steps. Use --steps 42 or more"),
    ],
)
def test_what_cannot_be_planned(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        PlanRequest(**{**USUAL, **changes})


def test_a_join_asks_only_for_sizes_that_fit() -> None:
    request = PlanRequest(faults=40, steps=400, workers=4, shards=6, kinds=(JOIN, KILL), sizes=(1, 2, 4))
    assert {fault.workers for fault in make_plan(request).faults if fault.kind == JOIN} == {1, 2, 4}
    with pytest.raises(InputError, match="another number of workers than 4"):
        PlanRequest(faults=4, steps=40, workers=4, shards=4, kinds=(JOIN,), sizes=(4,))
