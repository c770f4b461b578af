"""Where a worker stands once the parts of a state were put together, also when a group breaks while it forms."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.errors import InputError
from paceline.recovery.agreement import (
    NEWCOMER,
    MemberReport,
    OpenBody,
    RolledBackError,
    broken_body,
    check_intact,
    check_kernels,
)
from paceline.recovery.group_state import GroupState
from paceline.recovery.handover import StateSource
from paceline.recovery.membership import STEP
from paceline.recovery.position import Position
from paceline.recovery.recovery import Recovery
from paceline.recovery.regrouping import Regrouping
from paceline.world.interruption import InterruptedWaitError, Interruption


def member(
    finished: int,
    number: int,
    redone: int = 0,
    body: int | None = None,
    *,
    asks: bool = False,
    kernels: str = "",
) -> MemberReport:
    return MemberReport(
        finished,
        Position(number=number),
        body=None if body is None else OpenBody(body, finished),
        asks_in_body=asks,
        sharded=True,
        redone=redone,
        dirty=False,
        moved=False,
        outside=False,
        serves=False,
        registers=False,
        kernels=kernels,
    )


def test_who_comes_with_other_kernels_is_refused_alone() -> None:
    members = [member(-1, 0, kernels="avx2"), member(5, 5, kernels="avx512"), member(-1, 0, kernels="avx512")]
    with pytest.raises(InputError, match="rank 0 computes on avx2, and rank 1 on avx512"):
        check_kernels(members, 0)
    for rank in (1, 2):
        check_kernels(members, rank)


def stand(
    change: Regrouping, number: int, mine: MemberReport, *others: MemberReport
) -> tuple[bool, int, int, bool]:
    """Take over the state of a step, and tell: missed something, operations finished, steps redone, gone back."""
    position = Position(number=number)
    change._stand(StateSource("workers", position), position, mine, [mine, *others], "what it came to")
    return change.group.missed, change.group.finished, change.redone, change.went_back


def group_state(world: Any = None, position: Position | None = None) -> GroupState:
    return GroupState(world=world, position=position or Position(), strategy=None, emit=None, workers=0)  # type: ignore[arg-type]


def regrouping(**parts: Any) -> Regrouping:
    known: dict[str, Any] = {"group": group_state(), "hooks": None, "options": None, "membership": None}
    return Regrouping(kind=STEP, sharded=None, **(known | parts))  # type: ignore[arg-type]


def made() -> tuple[Regrouping, list[Any]]:
    gone: list[Any] = []
    return regrouping(hooks=SimpleNamespace(go_back=gone.append)), gone


def test_what_was_missed_stays_missed_until_it_is_counted() -> None:
    change, gone = made()
    assert stand(change, 8, member(7, 7), member(8, 8)) == (True, 8, 0, False)
    # The group broke once more before it was entered; by now this worker stands where the others do.
    assert stand(change, 8, member(8, 8), member(8, 8)) == (True, 8, 0, False)
    assert not gone


def test_all_know_of_steps_that_one_has_gone_back_by() -> None:
    change, gone = made()
    # The other one went back from step 8 to step 7 in an attempt that this worker did not come through.
    found = stand(change, 7, member(7, 7), member(10, 7, redone=1))
    assert found == (False, 11, 1, True)
    assert gone == [Position(number=7)]
    # And what was gone back by counts on when the next attempt goes back no further.
    assert stand(change, 7, member(11, 7, redone=1)) == (False, 12, 1, True)


def test_an_epoch_s_end_is_done_again_though_no_step_is() -> None:
    change, gone = made()
    saved, now = Position(epoch=0, step=8, number=8), Position(epoch=1, step=0, number=8)
    mine = replace(member(9, 8), position=now)
    change._stand(StateSource("checkpoint", saved), saved, mine, [mine, mine], None)
    assert (gone, change.went_back) == ([saved], True)


def test_nobody_goes_on_outside_of_the_steps_from_a_state_of_before() -> None:
    change, gone = made()
    here = Position(number=8)
    mine = replace(member(9, 8), outside=True)
    with pytest.raises(RolledBackError):
        change._stand(StateSource("copies", here), here, member(9, 8), [member(9, 8), mine], None)
    change._stand(StateSource("workers", here), here, mine, [mine, mine], None)
    assert not gone


def test_nobody_takes_over_half_of_what_a_body_does() -> None:
    done, behind = member(8, 8), member(7, 7)
    check_intact([done, behind, replace(member(NEWCOMER, 0), moved=True)])
    check_intact([replace(done, moved=True), done])
    check_intact([done, replace(behind, dirty=True)])  # what it has done is not what goes over
    for ahead in (replace(done, dirty=True), replace(done, moved=True)):
        with pytest.raises(RolledBackError):
            check_intact([ahead, behind])
    with pytest.raises(RolledBackError):
        check_intact([replace(done, dirty=True), done])


def test_an_error_of_the_user_s_code_is_not_the_break_it_came_with() -> None:
    interruption = Interruption()
    interruption.interrupt()
    recovery = Recovery(
        SimpleNamespace(world=SimpleNamespace(interruption=interruption)),  # type: ignore[arg-type]
        SimpleNamespace(elastic=True, newcomer=False),  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
    )
    recovery._begun = True
    assert not recovery.survives(KeyError("label"))
    assert recovery.survives(RuntimeError("Connection closed by peer"))
    told = ValueError("could not measure")
    told.__cause__ = InterruptedWaitError("the group is broken")
    assert recovery.survives(told)


def test_going_back_is_final_also_where_the_next_group_broke_meanwhile() -> None:
    """What was put together belongs to another step than the one this worker stands at: nobody may be offered it."""
    interruption = Interruption()
    left: list[bool] = []
    world = SimpleNamespace(interruption=interruption, status_page=SimpleNamespace(enter=lambda _: None))
    group = group_state(world, Position(number=12))
    change = regrouping(
        group=group,
        hooks=SimpleNamespace(
            leave_group=lambda: left.append(True), break_off=lambda **_: (False, False), open_body=None
        ),
        options=SimpleNamespace(laid_out=lambda world: world),
        membership=SimpleNamespace(leaving=False, next_place=lambda _: SimpleNamespace(stop=False)),
    )

    def agree(*_: object) -> None:
        interruption.interrupt()  # another worker that goes back was faster, and its end has broken the group
        raise RolledBackError(8)

    change._connect = lambda _: group.world  # type: ignore[method-assign]
    change._agree = agree  # type: ignore[method-assign,assignment]
    with pytest.raises(RolledBackError):
        change.enter_next()
    assert left == [True, True]


def test_all_go_through_the_body_that_the_furthest_are_in() -> None:
    """One that has yet to come to that step does so, too; one that stands behind it does not count."""
    assert broken_body([member(5, 4), member(5, 4, body=4, asks=True)]) == OpenBody(4, 5)
    assert broken_body([member(4, 3, body=3), member(5, 4, body=4, asks=True)]) == OpenBody(4, 5)
    assert broken_body([member(4, 3, body=3, asks=True), member(5, 4)]) is None


def test_two_attempts_at_one_step_are_told_apart() -> None:
    """One that is still in the first, behind an evaluation that the others have finished, goes through the second, too."""
    behind, ahead = member(5, 4, body=4, asks=True), member(6, 4, body=4, asks=True)
    body = broken_body([behind, ahead])
    assert body == ahead.body
    assert body != behind.body


def test_it_is_enough_that_one_knows_of_calls_in_the_body() -> None:
    """One that has joined may not have come to them yet."""
    assert broken_body([member(5, 4, asks=True), member(5, 4, body=4)]) == OpenBody(4, 5)
    assert broken_body([member(5, 4), member(5, 4, body=4)]) is None
