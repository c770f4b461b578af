"""Where a worker stands once the parts of a state were put together, also when a group breaks while it forms."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.training.handover import Source
from paceline.training.membership import EVALUATE, STEP, FixedMembership
from paceline.training.position import Position
from paceline.training.recovery import NEWCOMER, Recovery, RolledBackError, _Member, check_intact
from paceline.world.interruption import InterruptedWaitError, Interruption


def member(finished: int, number: int, kind: str = STEP, redone: int = 0) -> _Member:
    return _Member(
        finished,
        Position(number=number),
        kind,
        cut=True,
        redone=redone,
        dirty=False,
        moved=False,
        outside=False,
    )


def stand(recovery: Recovery, number: int, mine: _Member, *others: _Member) -> tuple[bool, int, int, bool]:
    """Take over the state of a step, and tell: missed something, operations finished, steps redone, gone back."""
    position = Position(number=number)
    recovery._stand(Source("workers", position), position, mine, [mine, *others], "what it came to")
    return recovery._missed, recovery._finished, recovery._redone, recovery._back


def made() -> tuple[Recovery, list[Any]]:
    gone: list[Any] = []
    return Recovery(SimpleNamespace(go_back=gone.append), FixedMembership()), gone  # type: ignore[arg-type]


def test_what_was_missed_stays_missed_until_it_is_counted() -> None:
    recovery, gone = made()
    assert stand(recovery, 8, member(7, 7), member(8, 8)) == (True, 8, 0, False)
    # The group broke once more before it was entered; by now this worker stands where the others do.
    assert stand(recovery, 8, member(8, 8), member(8, 8)) == (True, 8, 0, False)
    assert not gone


def test_all_know_of_steps_that_one_has_gone_back_by() -> None:
    recovery, gone = made()
    # The other one went back from step 8 to step 7 in an attempt that this worker did not come through.
    found = stand(recovery, 7, member(7, 7), member(10, 7, EVALUATE, redone=1))
    assert found == (False, 11, 1, True)
    assert gone == [Position(number=7)]
    # And what was gone back by counts on when the next attempt goes back no further.
    assert stand(recovery, 7, member(11, 7, redone=1)) == (False, 12, 1, True)


def test_an_epoch_s_end_is_done_again_though_no_step_is() -> None:
    recovery, gone = made()
    saved, now = Position(epoch=0, step=8, number=8), Position(epoch=1, step=0, number=8)
    mine = replace(member(9, 8), position=now)
    recovery._stand(Source("checkpoint", saved), saved, mine, [mine, mine], None)
    assert (gone, recovery._back) == ([saved], True)


def test_nobody_goes_on_outside_of_the_steps_from_a_state_of_before() -> None:
    recovery, gone = made()
    here = Position(number=8)
    mine = replace(member(9, 8), outside=True)
    with pytest.raises(RolledBackError):
        recovery._stand(Source("copies", here), here, member(9, 8), [member(9, 8), mine], None)
    recovery._stand(Source("workers", here), here, mine, [mine, mine], None)
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
    run = SimpleNamespace(
        world=SimpleNamespace(interruption=interruption, pulse=SimpleNamespace(enter=lambda _: None)),
        replica_or_none=None,
        position=Position(number=12),
        leave_group=lambda: left.append(True),
        break_off=lambda **_: (False, False),
        laid_out=lambda world: world,
    )
    recovery = Recovery(
        run,  # type: ignore[arg-type]
        SimpleNamespace(newcomer=False, leaving=False, next_place=lambda _: SimpleNamespace(stop=False)),  # type: ignore[arg-type]
    )

    def agree(*_: object) -> None:
        interruption.interrupt()  # another worker that goes back was faster, and its end has broken the group
        raise RolledBackError(8)

    recovery._connect = lambda _: run.world  # type: ignore[method-assign]
    recovery._agree = agree  # type: ignore[method-assign,assignment]
    with pytest.raises(RolledBackError):
        recovery.regroup(STEP)
    assert left == [True, True]
