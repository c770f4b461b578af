"""The decisions about who belongs to the group, without a process in sight."""

from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.launch.actions import (
    Assign,
    AwaitCause,
    Begin,
    Break,
    Expel,
    GiveUp,
    Release,
    Say,
    Start,
    StartOver,
    Tell,
)
from paceline.launch.failures import WorkerFailure
from paceline.launch.member import State
from paceline.launch.membership import Membership
from paceline.launch.policy import Policy
from paceline.recovery.membership import BODY, EVALUATE, STATE_LOST, STEP, Standing
from paceline.strategies import choice


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def killed(rank=0):
    return WorkerFailure(rank=rank, host="here", kind="signal", message="was killed by SIGKILL")


def raised(rank=0):
    return WorkerFailure(rank=rank, host="here", kind="code", message="ValueError: no", trace="a trace")


def exited(rank=0):
    return WorkerFailure(rank=rank, host="here", kind="exit", message="exited with status 3")


def training(workers=3, clock=None, **policy):
    """A group in training, as it is when all have begun."""
    made = Membership(Policy(workers=workers, shards=policy.pop("shards", 6), **policy), clock or Clock())
    for number in range(workers):
        made.add(number, rank=number)
    for number in range(workers):
        made.began(number)
    return made


def standing(operation=5, kind=STEP):
    return Standing(operation=operation, kind=kind, step=operation)


def of(kind, actions):
    return [action for action in actions if isinstance(action, kind)]


def regroup(made, *numbers, **stands):
    actions = []
    for number in numbers:
        actions += made.broken(number, standing(**stands))
    return actions


def test_a_death_breaks_the_group_at_once_and_the_others_form_the_next():
    made = training()
    actions = made.lost(1, killed(1))
    assert of(Break, actions) == [Break(0, 0, at_once=True), Break(2, 0, at_once=True)]
    assert of(Start, actions) == [Start(1)]
    assert not of(Assign, made.broken(0, standing()))
    placed = of(Assign, made.broken(2, standing()))
    assert [(one.member, one.rank, one.size, one.generation) for one in placed] == [
        (0, 0, 2, 1),
        (2, 1, 2, 1),
    ]
    assert placed[0].reason == "rank 1 was killed by SIGKILL"


def test_a_worker_that_noticed_first_makes_the_others_leave_too():
    made = training()
    assert of(Break, made.broken(2, standing())) == [Break(0, 0, at_once=True), Break(1, 0, at_once=True)]
    made.lost(1, killed(1))
    assert [one.rank for one in of(Assign, made.broken(0, standing()))] == [0, 1]


def test_a_newcomer_is_let_in_at_a_step_and_nobody_is_broken_off():
    made = training(2)
    made.resize(3)
    made.add(7, rank=None)
    assert made.ready(7) == [Break(0, 0, at_once=False), Break(1, 0, at_once=False)]
    assert not of(Break, made.broken(0, standing()))[0].at_once
    placed = of(Assign, made.broken(1, standing()))
    assert [(one.member, one.rank) for one in placed] == [(0, 0), (1, 1), (7, 2)]


def test_a_newcomer_waits_while_the_others_evaluate_and_gets_in_at_the_next_step():
    made = training()
    made.lost(2, killed(2))
    made.add(3, rank=None)
    made.ready(3)
    actions = regroup(made, 0, 1, kind=EVALUATE)
    assert [one.member for one in of(Assign, actions)] == [0, 1]
    assert of(Break, actions)[-2:] == [Break(0, 1, at_once=False), Break(1, 1, at_once=False)]
    assert [one.member for one in of(Assign, regroup(made, 0, 1, operation=6))] == [0, 1, 3]


@pytest.mark.parametrize("kinds", [(BODY, BODY), (STEP, BODY), (BODY, STEP)])
def test_nobody_joins_as_long_as_one_is_in_the_body_of_its_loop(kinds):
    made = training()
    made.lost(2, killed(2))
    made.add(3, rank=None)
    made.ready(3)
    made.broken(0, standing(kind=kinds[0]))
    actions = made.broken(1, standing(kind=kinds[1]))
    assert [one.member for one in of(Assign, actions)] == [0, 1]
    assert [one.at_once for one in of(Break, actions)] == [False, False]
    assert [one.member for one in of(Assign, regroup(made, 0, 1))] == [0, 1, 3]


@pytest.mark.parametrize("kind", [BODY, EVALUATE])
def test_too_few_end_what_they_do_together_and_wait_before_their_next_step(kind):
    made = training(min_workers=3)
    made.lost(2, killed(2))
    made.add(3, rank=None)
    actions = regroup(made, 0, 1, kind=kind)
    assert [one.size for one in of(Assign, actions)] == [2, 2]
    assert [one.at_once for one in of(Break, actions)] == [False, False]
    assert not of(Assign, regroup(made, 0, 1, operation=6))
    assert [one.size for one in of(Assign, made.ready(3))] == [3, 3, 3]


def test_and_end_there_where_nobody_comes():
    made = training(min_workers=3, max_restarts=0)
    made.lost(2, killed(2))
    assert not of(GiveUp, regroup(made, 0, 1, kind=EVALUATE))
    (end,) = of(GiveUp, regroup(made, 0, 1, operation=6))
    assert end.failure.message.startswith("2 of at least 3 workers are left")


def test_what_the_furthest_ahead_is_about_to_do_counts():
    made = training()
    made.lost(2, killed(2))
    made.add(3, rank=None)
    made.ready(3)
    made.broken(0, standing(operation=6, kind=EVALUATE))
    assert [one.member for one in of(Assign, made.broken(1, standing(operation=5)))] == [0, 1]


def test_a_death_in_the_middle_of_a_regroup_begins_another():
    made = training(4)
    made.lost(3, killed(3))
    regroup(made, 0, 1, 2)
    actions = made.lost(0, killed(0))
    assert of(Break, actions) == [Break(1, 1, at_once=True), Break(2, 1, at_once=True)]
    placed = of(Assign, regroup(made, 1, 2))
    assert [(one.member, one.rank, one.generation) for one in placed] == [(1, 0, 2), (2, 1, 2)]


def test_one_that_is_awaited_and_dies_is_not_waited_for():
    made = training()
    made.lost(2, killed(2))
    made.broken(0, standing())
    assert [(one.member, one.size) for one in of(Assign, made.lost(1, killed(1)))] == [(0, 1)]


def test_resizing_down_lets_the_last_ranks_go():
    made = training(4)
    assert len(of(Break, made.resize(2))) == 4
    actions = regroup(made, 0, 1, 2, 3)
    assert [one.member for one in of(Assign, actions)] == [0, 1]
    assert [one.member for one in of(Release, actions)] == [2, 3]
    assert made.ended(3) == []


def test_resizing_down_before_newcomers_are_ready_lets_them_go_first():
    made = training(4, shards=8)
    assert made.resize(7) == [Start(3)]
    for number in (4, 5, 6):
        made.add(number, rank=None)
    actions = made.resize(2)
    assert [one.member for one in of(Release, actions)] == [4, 5, 6]
    assert made.ready(5) == []
    assert [one.member for one in of(Assign, regroup(made, 0, 1, 2, 3))] == [0, 1]


def test_nobody_joins_behind_an_operation_that_others_finished():
    made = training()
    made.lost(2, killed(2))
    made.add(3, rank=None)
    made.ready(3)
    assert [one.member for one in of(Assign, regroup(made, 0, 1, kind="missed"))] == [0, 1]


def test_a_worker_with_notice_is_replaced_and_kept_until_there_are_enough():
    made = training(1)
    assert made.wants_to_leave(0) == [Start(1)]
    made.add(1, rank=None)
    assert of(Break, made.ready(1)) == [Break(0, 0, at_once=False, leaving=True)]
    # Both are in one group first: the one that leaves holds the state.
    actions = made.broken(0, standing())
    assert [one.member for one in of(Assign, actions)] == [0, 1]
    assert of(Break, actions) == [Break(0, 1, at_once=False, leaving=True), Break(1, 1, at_once=False)]
    actions = regroup(made, 0, 1, operation=6)
    assert [one.member for one in of(Assign, actions)] == [1]
    assert [one.member for one in of(Release, actions)] == [0]


def test_replacements_are_rationed_and_the_ration_comes_back():
    clock = Clock()
    made = training(3, clock, max_restarts=1)
    assert of(Start, made.lost(2, killed(2)))
    regroup(made, 0, 1)
    assert not of(Start, made.lost(1, killed(1)))
    regroup(made, 0)
    clock.now = 61.0
    assert of(Start, made.wants_to_leave(0))


def test_too_few_wait_for_those_on_their_way_and_give_up_when_nobody_is():
    made = training(2, min_workers=2, max_restarts=1)
    made.lost(1, killed(1))
    made.add(2, rank=None)
    assert made.broken(0, standing()) == []
    (given_up,) = made.lost(2, killed())
    assert isinstance(given_up, GiveUp)
    assert "1 of at least 2 workers are left" in given_up.failure.message


def test_when_nobody_is_left_all_start_over():
    made = training(2)
    made.lost(0, killed(0))
    assert isinstance(made.lost(1, killed(1))[-1], StartOver)


def test_nobody_starts_over_what_somebody_has_finished():
    made = training(2)
    made.ended(0)
    assert not of(StartOver, made.lost(1, killed(1)))


class TestStopping:
    """A run that is interrupted ends behind a step that all have finished."""

    def test_all_leave_at_a_step_and_meet_once_more_to_save(self):
        made = training(3)
        assert made.stop() == [Break(one, 0, at_once=False) for one in range(3)]
        placed = of(Assign, regroup(made, 0, 1, 2))
        assert [(one.member, one.stop) for one in placed] == [(0, True), (1, True), (2, True)]
        assert [made.ended(one) for one in range(3)] == [[], [], []]

    def test_nobody_joins_or_is_replaced_any_more(self):
        made = training(3, min_workers=3)
        made.add(7, rank=None)
        made.stop()
        made.ready(7)
        assert not of(Start, made.lost(1, killed(1)))
        assert [one.member for one in of(Assign, regroup(made, 0, 2))] == [0, 2]

    def test_a_death_in_the_last_checkpoint_begins_another_last_group(self):
        made = training(3)
        made.stop()
        regroup(made, 0, 1, 2)
        made.lost(1, killed(1))
        placed = of(Assign, regroup(made, 0, 2, kind="save"))
        assert [(one.member, one.stop) for one in placed] == [(0, True), (2, True)]

    def test_one_that_begins_late_is_told_too(self):
        made = Membership(Policy(workers=2, shards=2), Clock())
        made.add(0, rank=0)
        made.add(1, rank=1)
        made.began(0)
        assert made.stop() == [Break(0, 0, at_once=False)]
        assert Break(1, 0, at_once=False) in made.began(1)

    def test_asked_for_in_a_change_it_holds_for_the_next_group(self):
        made = training(3)
        made.lost(1, killed(1))
        assert made.stop() == []
        assert all(one.stop for one in of(Assign, regroup(made, 0, 2)))

    def test_an_exception_meanwhile_ends_the_run(self):
        made = training(3)
        made.stop()
        assert of(GiveUp, made.lost(1, raised(1), step=4))


class TestExceptions:
    """An error of the user's code is retried once in the same place; it never changes the layout of the run."""

    def test_the_others_wait_for_the_replacement_which_takes_the_same_rank(self):
        made = training(3)
        actions = made.lost(1, raised(1), step=4)
        assert of(Start, actions) == [Start(1)]
        assert len(of(Break, actions)) == 2
        made.add(7, rank=None)
        assert not of(Assign, regroup(made, 0, 2))
        assert made.group() == []
        placed = of(Assign, made.ready(7))
        assert [(one.member, one.rank, one.size) for one in placed] == [(0, 0, 3), (7, 1, 3), (2, 2, 3)]
        assert [asdict(one) for one in made.errors] == [
            {"rank": 1, "step": 4, "message": "ValueError: no", "retried": True}
        ]

    @pytest.mark.parametrize(
        ("loss", "words", "shown"),
        [
            (raised(1), STATE_LOST, True),
            (raised(1), "the data is empty", False),
            (killed(1), STATE_LOST, False),
        ],
    )
    def test_one_that_leaves_nothing_to_go_on_from_is_shown_for_what_comes_of_it(self, loss, words, shown):
        made = training(3)
        made.lost(1, loss, step=4)
        follows = WorkerFailure(rank=0, host="here", kind="input", message=f"{words} and so on")
        assert of(GiveUp, made.lost(0, follows, step=4)) == [GiveUp(loss if shown else follows)]

    @pytest.mark.parametrize("rank", [0, 2, 3])
    def test_a_server_and_any_rank_come_back_where_they_were(self, rank):
        made = training(4, choice=replace(choice("ps"), servers=1).pinned(3), shards=3)
        made.lost(rank, raised(rank), step=4)
        made.add(7, rank=None)
        regroup(made, *{0, 1, 2, 3} - {rank})
        assert {one.member: one.rank for one in of(Assign, made.ready(7))}[7] == rank

    def test_raised_by_all_it_is_the_end(self):
        made = training(2)
        assert not of(GiveUp, made.lost(0, raised(0), step=4))
        (end,) = of(GiveUp, made.lost(1, raised(1), step=4))
        assert end.failure.rank == 0

    def test_raised_where_nobody_is_left_it_is_shown_and_not_a_loss_before_it(self):
        made = training(2)
        made.lost(0, killed(0))
        failure = raised(1)
        assert of(GiveUp, made.lost(1, failure, step=5)) == [GiveUp(failure)]

    def test_raised_again_in_the_same_step_it_is_the_end(self):
        made = training(3)
        made.lost(1, raised(1), step=4)
        made.add(7, rank=None)
        regroup(made, 0, 2)
        made.ready(7)
        (end,) = of(GiveUp, made.lost(7, raised(1), step=4))
        assert end.failure.trace == "a trace"

    def test_in_another_step_it_is_retried_again(self):
        made = training(3)
        made.lost(1, raised(1), step=4)
        made.add(7, rank=None)
        regroup(made, 0, 2)
        made.ready(7)
        assert not of(GiveUp, made.lost(7, raised(1), step=5))

    @pytest.mark.parametrize("policy", [{"max_restarts": 0}, {"elastic": False}])
    def test_where_nobody_may_be_started_it_is_the_end(self, policy):
        failure = raised(1)
        assert of(GiveUp, training(3, **policy).lost(1, failure, step=4)) == [GiveUp(failure)]

    def test_where_the_budget_is_spent_it_is_the_end(self):
        made = training(3, max_restarts=1)
        made.lost(2, killed(2))
        made.add(7, rank=None)
        regroup(made, 0, 1)
        made.ready(7)
        regroup(made, 0, 1)
        assert len(made.group()) == 3
        assert of(GiveUp, made.lost(1, raised(1), step=4))

    def test_a_replacement_that_fails_as_well_is_the_end(self):
        made = training(3)
        made.lost(1, raised(1), step=4)
        made.add(7, rank=None)
        regroup(made, 0, 2)
        assert of(GiveUp, made.lost(7, raised(-1)))

    def test_a_replacement_that_is_killed_is_replaced_as_far_as_the_budget_goes(self):
        made = training(3, max_restarts=2)
        made.lost(1, raised(1), step=4)
        made.add(7, rank=None)
        regroup(made, 0, 2)
        assert of(Start, made.lost(7, killed())) == [Start(1)]
        made.add(8, rank=None)
        (end,) = of(GiveUp, made.lost(8, killed()))
        assert end.failure.trace == "a trace"

    def test_in_an_evaluation_the_others_end_it_and_wait_before_their_next_step(self):
        made = training(3)
        made.lost(1, exited(1))
        made.add(7, rank=None)
        placed = regroup(made, 0, 2, kind=EVALUATE)
        assert [(one.member, one.size) for one in of(Assign, placed)] == [(0, 2), (2, 2)]
        assert [(one.member, one.at_once) for one in of(Break, placed)] == [(0, False), (2, False)]
        assert not of(Assign, regroup(made, 0, 2))
        assert [(one.member, one.size) for one in of(Assign, made.ready(7))] == [(0, 3), (7, 3), (2, 3)]
        assert not of(GiveUp, made.lost(7, exited(1)))  # the step behind that evaluation is another matter

    @pytest.mark.parametrize("kind", [BODY, EVALUATE])
    def test_the_one_that_comes_later_still_has_the_place_of_the_one_that_failed(self, kind):
        made = training(4)
        made.lost(1, raised(1), step=5)
        made.add(7, rank=None)
        placed = of(Assign, regroup(made, 0, 2, 3, kind=kind))
        assert [(one.member, one.rank) for one in placed] == [(0, 0), (2, 1), (3, 2)]
        regroup(made, 0, 2, 3)
        assert [(one.member, one.rank) for one in of(Assign, made.ready(7))] == [
            (0, 0),
            (7, 1),
            (2, 2),
            (3, 3),
        ]

    def test_so_have_two(self):
        made = training(4)
        made.lost(1, raised(1), step=5)
        made.add(7, rank=None)
        regroup(made, 0, 2, 3, kind=BODY)
        made.lost(3, raised(2), step=6)
        made.add(8, rank=None)
        regroup(made, 0, 2)
        made.ready(7)
        placed = of(Assign, made.ready(8))
        assert [(one.member, one.rank) for one in placed] == [(0, 0), (7, 1), (2, 2), (8, 3)]

    def test_in_a_body_that_is_done_once_more_it_is_the_end(self):
        made = training(3)
        made.lost(1, exited(1))
        made.add(7, rank=None)
        regroup(made, 0, 2, kind=BODY)
        made.ready(7)
        regroup(made, 0, 2)
        made.lost(7, exited(1))
        made.add(8, rank=None)
        assert of(GiveUp, regroup(made, 0, 2, kind=BODY))

    def test_in_an_evaluation_that_is_repeated_it_is_the_end(self):
        made = training(3)
        made.lost(1, exited(1))
        made.add(7, rank=None)
        regroup(made, 0, 2, kind=EVALUATE)
        made.lost(2, exited(1))
        made.add(8, rank=None)
        assert of(GiveUp, regroup(made, 0, kind=EVALUATE))

    def test_in_the_last_evaluation_it_is_the_end(self):
        made = training(3)
        made.lost(1, exited(1))
        made.add(7, rank=None)
        regroup(made, 0, 2, kind=EVALUATE)
        assert of(GiveUp, made.ended(0))

    def test_raised_where_others_have_come_to_the_end_it_is_the_end(self):
        made = training(2)
        made.ended(0)
        assert of(GiveUp, made.lost(1, raised(1), step=4))

    @pytest.mark.parametrize("trains", [False, True])
    def test_raised_behind_the_last_step_it_is_the_end_whoever_is_heard_of_first(self, trains):
        made, failure = training(3, trains=trains), raised(0)
        assert not of(GiveUp, made.lost(0, failure, step=15))
        made.add(7, rank=None)
        assert made.ended(1) == [GiveUp(failure)]

    def test_a_worker_killed_behind_the_last_step_is_missed_where_each_returns_something(self):
        for trains in (False, True):
            made, failure = training(2, trains=trains), killed(0)
            made.lost(0, failure)
            found = made.ended(1)
            assert len(found) == (not trains)
            for end in found:
                assert end.failure.rank == 0
                assert end.failure.cause().startswith(
                    f"{failure.message} where another worker has returned already"
                )

    def test_an_exit_without_a_known_step_counts_for_the_step_of_the_others(self):
        exited = WorkerFailure(rank=1, host="here", kind="exit", message="exited with status 0")
        made = training(3)
        made.lost(1, exited)
        made.add(7, rank=None)
        regroup(made, 0, 2, operation=4)
        made.ready(7)
        assert made.errors[0].step == 4
        made.lost(7, exited)
        assert of(GiveUp, regroup(made, 0, 2, operation=4))

    def test_one_that_a_worker_tries_again_by_itself_is_counted(self):
        made = training(3)
        assert made.raised(1, raised(1), step=4) == [Break(one, 0, at_once=True) for one in range(3)]
        placed = of(Assign, regroup(made, 0, 1, 2, kind=EVALUATE))
        assert [one.member for one in placed] == [0, 1, 2]
        assert placed[0].reason == "rank 1 failed"
        assert made.restarts == 0
        assert of(GiveUp, made.raised(2, raised(2), step=4))
        assert not of(GiveUp, training(3).raised(1, raised(1), step=4))
        assert of(GiveUp, training(1).raised(0, raised(0), step=4))
        assert of(GiveUp, training(3, max_restarts=0).raised(1, raised(1), step=4))

    @settings(max_examples=200, deadline=None)
    @given(st.lists(st.tuples(st.sampled_from("xbr"), st.integers(0, 9)), max_size=40))
    def test_whatever_raises_the_size_of_the_group_never_changes(self, happenings):
        made = training(3, max_restarts=50)
        for step, (what, which) in enumerate(happenings):
            member = made.members[which % len(made.members)]
            alive = member.state in (State.TRAINING, State.BROKEN)
            actions = (
                (made.lost(member.number, raised(member.rank), step=step) if alive else [])
                if what == "x"
                else happen(made, what, member, which)
            )
            if not carry_out(made, actions):
                return
            assert {one.size for one in of(Assign, actions)} <= {3}
            assert len(made.group()) in (0, 3)

    @settings(max_examples=200, deadline=None)
    @given(st.data(), st.integers(2, 4), st.sampled_from(["code", "exit"]), st.integers(0, 2))
    def test_in_whatever_order_it_is_heard_of_the_same_layout_goes_on(
        self, data, workers, kind, killed_before
    ):
        made = training(workers, min_workers=workers)
        failing = data.draw(st.integers(0, workers - 1))
        failure = WorkerFailure(rank=failing, host="here", kind=kind, message="no", trace="a trace")
        left = data.draw(st.permutations(range(workers)))
        newcomers = 0
        while left or not made.group():
            # The replacement is there at any time behind its start, and may be killed before it is ready.
            coming = [
                one.number for one in made.members.values() if one.newcomer and one.state is State.STARTING
            ]
            if coming and (not left or data.draw(st.booleans())):
                lost = newcomers < killed_before
                newcomers += lost
                actions = made.lost(coming[0], killed()) if lost else made.ready(coming[0])
            elif left[0] == failing:
                left, actions = left[1:], made.lost(failing, failure, step=4 if kind == "code" else None)
            else:
                actions, left = made.broken(left[0], standing(4)), left[1:]
            assert carry_out(made, actions), actions
        assert {one.rank for one in made.group() if one.number >= workers} == {failing}
        assert len(made.group()) == workers
        assert [(one.rank, one.step) for one in made.errors] == [(failing, 4)]
        assert made.restarts == 1 + newcomers

    def test_an_evaluation_and_the_step_behind_it_are_not_the_same_place(self):
        made = training(2)
        made.raised(1, raised(-1), step=8)
        regroup(made, 0, 1, kind=EVALUATE)
        assert not of(GiveUp, made.lost(0, raised(0), step=8))
        assert [one.rank for one in made.errors] == [1, 0]

    def test_a_kill_beside_it_still_makes_the_group_smaller_by_one(self):
        made = training(4, max_restarts=1)
        made.lost(1, raised(1), step=4)
        made.add(7, rank=None)
        made.lost(2, killed(2))
        regroup(made, 0, 3)
        placed = of(Assign, made.ready(7))
        assert [(one.member, one.rank) for one in placed] == [(0, 0), (7, 1), (3, 2)]


@pytest.mark.parametrize("trains", [False, True])
def test_a_death_before_the_first_group_came_to_be(trains):
    made = Membership(Policy(workers=2, shards=2, trains=trains), Clock())
    made.add(0, rank=0)
    made.add(1, rank=1)
    (action,) = made.lost(1, killed(1))
    assert isinstance(action, StartOver if trains else GiveUp)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 0, 1)])
def test_a_bug_in_the_first_start_ends_the_run_whoever_is_heard_of_first(order, late):
    made = Membership(Policy(workers=3, shards=3, trains=True), Clock())
    for number in range(3):
        made.add(number, rank=number)
    if late:
        made.began(0)
    echo = WorkerFailure(rank=0, host="here", kind="peer", message="lost a peer", trace="an echo")
    actions = []
    while not of(GiveUp, actions):
        number, *order = order
        actions = made.lost(number, raised(1) if number == 1 else replace(echo, rank=number))
        assert [type(one) for one in actions] == [GiveUp if number == 1 else AwaitCause]
    assert of(GiveUp, actions)[0].failure.rank == 1
    assert made.restarts == 0


def test_where_nobody_says_why_a_start_failed_all_start_over():
    made = Membership(Policy(workers=3, shards=3, trains=True), Clock())
    for number in range(3):
        made.add(number, rank=number)
    echo = WorkerFailure(rank=0, host="here", kind="peer", message="lost a peer", trace="an echo")
    assert [made.lost(number, replace(echo, rank=number)) for number in (0, 1)] == [[AwaitCause()]] * 2
    assert isinstance(made.lost(2, echo)[0], StartOver)
    assert made.restarts == 1
    made.restarted()
    assert made.unexplained() == []
    made.add(3, rank=0)
    made.add(4, rank=1)
    made.lost(3, echo)
    assert isinstance(made.unexplained()[0], StartOver)


def test_wrong_input_and_a_run_that_is_not_elastic_end_at_the_first_loss():
    wrong = WorkerFailure(rank=0, host="here", kind="input", message="no")
    assert isinstance(training().lost(0, wrong)[0], GiveUp)
    assert isinstance(training(elastic=False).lost(0, killed())[0], GiveUp)


def test_shares_hold_for_one_group_and_no_longer():
    made = training(2)
    made.reshare([4, 2])
    placed = of(Assign, regroup(made, 0, 1))
    assert {one.shares for one in placed} == {(4, 2)}
    assert made.carried() == [4, 2]
    made.lost(1, killed(1))
    assert of(Assign, regroup(made, 0))[0].shares is None


def test_each_machine_has_its_ranks_in_a_row_the_leaders_first():
    made = training(2)
    made.members[1].host = 1
    made.resize(4)
    made.add(2, rank=None, host=0)
    made.add(3, rank=None, host=1)
    made.ready(2)
    made.ready(3)
    placed = of(Assign, regroup(made, 0, 1))
    assert [one.member for one in sorted(placed, key=lambda one: one.rank)] == [0, 2, 1, 3]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("kbrlt"), st.integers(0, 9)), max_size=60))
def test_whatever_happens_there_is_one_group_with_all_ranks_or_an_end(happenings):
    made = training(3, max_restarts=50)
    for what, which in happenings:
        member = made.members[which % len(made.members)]
        if not carry_out(made, happen(made, what, member, which)):
            return
        group = made.group()
        assert [one.rank for one in group] == list(range(len(group)))
        assert len(group) <= 6
    # Whoever is still in the old group comes out of it in the end; then the next one forms.
    for member in list(made.members.values()):
        if not carry_out(made, happen(made, "b", member, 0) + happen(made, "r", member, 0)):
            return
    assert any(one.state in (State.TRAINING, State.BROKEN) for one in made.members.values())


def happen(made, what, member, which):
    """Let one thing happen to a worker, where it can."""
    if what == "k" and member.state not in (State.ENDED, State.RELEASED):
        return made.lost(member.number, killed(member.rank))
    if what == "b" and member.state is State.TRAINING:
        return made.broken(member.number, standing(made.generation))
    if what == "r" and member.state is State.STARTING and member.newcomer:
        return made.ready(member.number)
    if what == "l":
        return made.wants_to_leave(member.number)
    return made.resize(1 + which % 6) if what == "t" else []


def carry_out(made, actions):
    """Start whom the decision asks for; says whether the run goes on."""
    for _ in range(sum(action.count for action in of(Start, actions))):
        made.add(len(made.members), rank=None)
    assert len({action.generation for action in of(Assign, actions)}) <= 1
    return not of(GiveUp, actions) and not of(StartOver, actions)


def test_shards_that_workers_share_are_not_rebalanced():
    made = training(4, choice=choice("ddp=2,tp=2"))
    assert made.carried() == [3, 3, 3, 3]
    assert made.reshare([4, 2, 3, 3]) == []
    assert len(of(Break, training(4, choice=choice("ddp=2,fsdp=2")).reshare([2, 2, 1, 1]))) == 4


class TestExpendable:
    """Workers of roles: nobody is replaced, but some can be done without."""

    def made(self, *, met=(0, 1, 2)):
        policy = Policy(workers=3, shards=3, elastic=False, expendable=frozenset({1, 2}))
        made = Membership(policy, Clock())
        for number in range(3):
            made.add(number, rank=number)
        for number in met:
            made.met(number)
        return made

    def test_nobody_begins_before_all_have_met(self):
        made = self.made(met=())
        assert made.met(2) == made.met(0) == []
        assert made.met(1) == [Begin(0), Begin(1), Begin(2)]

    @pytest.mark.parametrize("failure", [killed(1), raised(1)])
    def test_the_others_are_told(self, failure):
        assert self.made().lost(1, failure) == [Tell(0, lost=1), Tell(2, lost=1)]

    def test_one_after_the_other_and_not_those_that_have_ended(self):
        made = self.made()
        made.lost(1, killed(1))
        made.ended(0)
        assert made.lost(2, killed(2)) == []

    def test_one_that_is_needed_ends_the_launch(self):
        failure = killed(0)
        assert self.made().lost(0, failure) == [GiveUp(failure)]

    def test_so_does_any_as_long_as_not_all_have_met(self):
        failure = killed(1)
        assert self.made(met=(0, 1)).lost(1, failure) == [GiveUp(failure)]

    def test_and_wrong_input(self):
        failure = WorkerFailure(rank=1, host="here", kind="input", message="no")
        assert self.made().lost(1, failure) == [GiveUp(failure)]


class TestFutile:
    """Groups that form and break again before anybody gets further are counted."""

    def kept_out(self, made, *numbers, blamed=2):
        actions = []
        for number in numbers:
            error = "no way" if number == blamed else ""
            actions += made.broken(number, replace(standing(), error=error))
        return actions

    def formed(self, **policy):
        clock = Clock()
        made = training(3, clock, **policy)
        made.lost(1, killed(1))
        assert of(Assign, regroup(made, 0, 2))
        return made, clock

    def test_the_next_is_put_off_longer_each_time_and_then_one_is_expelled(self):
        made, clock = self.formed(max_restarts=0)
        for wait in (0.1, 0.4):
            actions = self.kept_out(made, 2, 0)
            assert not of(Assign, actions)
            assert "(no way): attempt" in of(Say, actions)[0].text
            assert made.due == pytest.approx(clock.now + wait)
            clock.now = made.due
            assert of(Assign, made.tick())
        (expelled,) = of(Expel, self.kept_out(made, 2, 0))
        assert expelled.member == 2
        assert [one.member for one in of(Assign, made.lost(2, expelled.failure))] == [0]

    def test_one_that_came_last_is_expelled_before_others(self):
        made, clock = self.formed()
        made.add(7, rank=None)
        made.ready(7)
        regroup(made, 0, 2)
        for _ in range(2):
            made.broken(0, replace(standing(), error="no way"))
            made.broken(7, replace(standing(), error="no way"))
            made.broken(2, standing())
            clock.now = made.due
            made.tick()
        made.broken(0, replace(standing(), error="no way"))
        made.broken(7, replace(standing(), error="no way"))
        assert [one.member for one in of(Expel, made.broken(2, standing()))] == [7]

    def test_whoever_gets_further_makes_all_of_it_good(self):
        made, _ = self.formed()
        for operation in range(6, 12):
            assert of(Assign, regroup(made, 0, 2, operation=operation))

    def test_a_loss_is_no_futile_attempt(self):
        made = training(6)
        for number in range(5, 1, -1):
            made.lost(number, killed(number))
            assert of(Assign, regroup(made, *range(number)))

    def test_alone_it_is_the_end(self):
        made, clock = self.formed(max_restarts=0)
        made.lost(2, killed(1))
        regroup(made, 0)
        for _ in range(2):
            self.kept_out(made, 0, blamed=0)
            clock.now = made.due
            made.tick()
        (end,) = of(GiveUp, self.kept_out(made, 0, blamed=0))
        assert "(no way)" in end.failure.message


class TestDeadlines:
    def test_a_replacement_that_does_not_come_up_is_expelled(self):
        clock = Clock()
        made = training(2, clock, min_workers=2, hang_timeout=4.0)
        made.lost(1, killed(1))
        made.add(2, rank=None)
        assert made.broken(0, standing()) == []
        assert made.due == 40.0
        assert made.tick() == []
        clock.now = 40.0
        (expelled,) = made.tick()
        assert (expelled.member, expelled.failure.message) == (2, "did not come up within 40 s")
        assert of(Start, made.lost(2, expelled.failure))

    def test_it_has_longer_where_the_first_took_long(self):
        clock = Clock()
        made = Membership(Policy(workers=1, shards=2, hang_timeout=4.0), clock)
        made.add(0, rank=0)
        clock.now = 100.0
        made.began(0)
        made.resize(2)
        made.add(1, rank=None)
        assert made.due == 400.0

    def test_one_that_was_released_and_does_not_end_is_expelled(self):
        clock = Clock()
        made = training(2, clock)
        made.resize(1)
        regroup(made, 0, 1)
        clock.now = made.due
        (expelled,) = made.tick()
        assert expelled.member == 1
        assert made.lost(1, expelled.failure) == []
        assert made.due is None


class TestDeadlySteps:
    """A step that kills its worker by a signal twice ends the run."""

    def died(self, step=4):
        return replace(killed(), step=step)

    def test_the_shards_that_both_carried_are_named(self):
        made = training(3)
        made.lost(1, self.died())
        regroup(made, 0, 2)
        (end,) = of(GiveUp, made.lost(0, self.died()))
        assert (end.failure.step, end.failure.shards) == (4, (2,))

    def test_it_counts_where_another_noticed_first(self):
        made = training(3)
        made.broken(2, standing(operation=4))
        made.lost(1, self.died())
        regroup(made, 0)
        (end,) = of(GiveUp, made.lost(0, self.died()))
        assert (end.failure.step, end.failure.shards) == (4, (2,))

    @pytest.mark.parametrize("step", [5, None])
    def test_in_another_step_it_is_survived(self, step):
        made = training(3)
        made.lost(1, self.died())
        regroup(made, 0, 2)
        assert not of(GiveUp, made.lost(0, self.died(step)))

    def test_so_is_it_with_other_shards_or_both_at_once(self):
        made = training(3)
        made.lost(0, self.died())
        regroup(made, 1, 2)
        assert not of(GiveUp, made.lost(2, self.died()))
        made = training(3)
        made.lost(0, self.died())
        assert not of(GiveUp, made.lost(1, self.died()))

    def test_it_is_remembered_over_a_new_start(self):
        made = training(1)
        assert of(StartOver, made.lost(0, self.died()))
        made.restarted()
        made.add(1, rank=0)
        made.began(1)
        assert of(GiveUp, made.lost(1, self.died()))


class TestSharedReplicas:
    """Where workers share a replica, none ever holds more of it than was planned."""

    def test_the_others_wait_for_a_replacement(self):
        made = training(4, choice=choice("ddp=2,tp=2"))
        made.lost(1, killed(1))
        made.add(7, rank=None)
        assert not of(Assign, regroup(made, 0, 2, 3))
        assert {one.size for one in of(Assign, made.ready(7))} == {4}

    def test_where_none_comes_a_whole_replica_goes_on(self):
        made = training(4, choice=choice("ddp=2,tp=2"), max_restarts=0)
        made.lost(1, killed(1))
        actions = regroup(made, 0, 2, 3)
        assert [(one.member, one.size) for one in of(Assign, actions)] == [(2, 2), (3, 2)]
        assert [one.member for one in of(Release, actions)] == [0]
        assert of(Say, actions)[0].text == (
            "3 workers are left, which ddp=2,tp=2 cannot be laid out on: 2 go on as ddp=1,tp=2, and 1 of them ends."
        )

    def test_a_pipeline_that_nobody_joins_is_cut_anew(self):
        made = training(4, choice=choice("pp=4"), max_restarts=0)
        made.lost(1, killed(1))
        actions = regroup(made, 0, 2, 3)
        assert {one.size for one in of(Assign, actions)} == {3}
        assert "3 go on as pp=3" in of(Say, actions)[0].text

    def test_one_that_would_have_nothing_to_do_breaks_nothing(self):
        made = training(2, choice=choice("ddp=1,tp=2"), shards=4)
        made.resize(4)
        made.add(7, rank=None)
        made.add(8, rank=None)
        assert made.ready(7) == []
        assert of(Break, made.ready(8))
        assert {one.size for one in of(Assign, regroup(made, 0, 1))} == {4}
