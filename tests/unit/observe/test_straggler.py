from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.observe.straggler import CaughtUp, Straggler, StragglerWatch, shares
from paceline.world.status_page import OperationKind, Phase, Reading


class Workers:
    """Ranks that take steps of given own times; a second of the run is a call."""

    def __init__(self, watch: StragglerWatch) -> None:
        self.watch, self.now = watch, 100.0
        self.spent: dict[int, list[float]] = {}

    def second(self, paces: dict[int, tuple[float, float]], steps: int = 20) -> list[Straggler | CaughtUp]:
        self.now += 1.0
        for rank, (data, compute) in paces.items():
            totals = self.spent.setdefault(rank, [0, 0.0, 0.0])
            totals[0] += steps
            totals[1] += steps * data
            totals[2] += steps * compute
        return self.watch.follow({rank: reading(*self.spent[rank]) for rank in paces}, self.now)

    def seconds(self, count: int, paces: dict[int, tuple[float, float]], steps: int = 20) -> list[object]:
        return list(itertools.chain.from_iterable(self.second(paces, steps) for _ in range(count)))


def reading(steps: float, data_s: float, compute_s: float) -> Reading:
    return Reading(
        phase=Phase.COMPUTE,
        since=0.0,
        touched=0.0,
        operation=int(steps),
        kind=OperationKind.STEP,
        step=int(steps),
        batches=int(steps),
        steps=int(steps),
        data_s=data_s,
        compute_s=compute_s,
        communication_s=0.0,
        longest_s=0.0,
    )


EVEN = dict.fromkeys(range(3), (0.001, 0.009))


@pytest.fixture
def workers() -> Workers:
    return Workers(StragglerWatch())


def test_even_workers_have_no_straggler(workers: Workers) -> None:
    assert workers.seconds(10, EVEN) == []


@pytest.mark.parametrize(
    ("pace", "cause"), [((0.021, 0.009), "data"), ((0.001, 0.029), "compute"), ((0.011, 0.019), "compute")]
)
def test_a_slow_rank_is_named_once_with_what_it_waits_for(
    workers: Workers, pace: tuple[float, float], cause: str
) -> None:
    found = workers.seconds(10, EVEN | {1: pace})
    assert found == [Straggler(1, pytest.approx(3.0), cause)]


def test_an_episode_ends_and_another_can_begin(workers: Workers) -> None:
    slow = EVEN | {2: (0.001, 0.029)}
    assert [type(one) for one in workers.seconds(6, slow)] == [Straggler]
    assert workers.seconds(8, EVEN) == [CaughtUp(2)]
    assert [type(one) for one in workers.seconds(8, slow)] == [Straggler]


def test_between_the_two_margins_nothing_changes(workers: Workers) -> None:
    between = EVEN | {2: (0.001, 0.013)}
    assert workers.seconds(8, between) == []
    assert len(workers.seconds(8, EVEN | {2: (0.001, 0.029)})) == 1
    assert workers.seconds(8, between) == []


def test_nobody_is_compared_with_times_that_were_not_measured(workers: Workers) -> None:
    assert workers.seconds(6, {0: (0.0, 0.3), 1: (0.0, 0.0)}) == []


def test_two_milliseconds_a_step_are_needed(workers: Workers) -> None:
    quick = {0: (0.0, 0.001), 1: (0.0, 0.0028)}
    assert workers.seconds(8, quick, steps=300) == []
    assert len(workers.seconds(8, {0: (0.0, 0.001), 1: (0.0, 0.0032)}, steps=300)) == 1


def test_three_seconds_and_five_steps_are_needed(workers: Workers) -> None:
    slow = {0: (0.0, 0.1), 1: (0.0, 0.9)}
    assert workers.seconds(3, slow, steps=1) == []
    assert workers.seconds(2, slow, steps=1) == []
    assert len(workers.seconds(1, slow, steps=1)) == 1


def test_a_single_worker_is_nobodys_straggler(workers: Workers) -> None:
    assert workers.seconds(8, {0: (0.5, 0.5)}) == []


def test_a_replaced_worker_starts_anew(workers: Workers) -> None:
    slow = EVEN | {1: (0.001, 0.029)}
    assert len(workers.seconds(6, slow)) == 1
    workers.spent[1] = [0, 0.0, 0.0]
    assert workers.seconds(3, slow) == []
    assert len(workers.seconds(3, slow)) == 1
    assert workers.watch.own_s() == {0: pytest.approx(0.01), 1: pytest.approx(0.03), 2: pytest.approx(0.01)}


def test_a_worker_that_left_is_forgotten(workers: Workers) -> None:
    workers.seconds(6, EVEN | {1: (0.001, 0.029)})
    left = {rank: pace for rank, pace in EVEN.items() if rank != 1}
    assert workers.seconds(6, left) == []
    assert sorted(workers.watch.own_s()) == [0, 2]


def test_shards_go_to_the_faster_workers() -> None:
    assert shares([0.04, 0.02, 0.02], [4, 4, 4]) == (2, 5, 5)
    assert shares([0.9, 0.1], [4, 4]) == (1, 7)


def test_shards_stay_where_little_is_gained() -> None:
    assert shares([0.0105, 0.01], [10, 10]) == (10, 10)
    assert shares([0.02, 0.01], [1, 1]) == (1, 1)


@given(
    st.lists(
        st.tuples(st.floats(0.001, 10.0), st.integers(1, 6)),
        min_size=1,
        max_size=4,
    )
)
def test_no_deal_is_better(workers: list[tuple[float, int]]) -> None:
    costs, carried = [cost for cost, _ in workers], [count for _, count in workers]
    own = [cost * count for cost, count in workers]
    dealt = shares(own, carried)
    best = min(
        max(cost * count for cost, count in zip(costs, deal, strict=True))
        for deal in itertools.product(range(1, sum(carried) + 1), repeat=len(costs))
        if sum(deal) == sum(carried)
    )
    slowest = max(cost * count for cost, count in zip(costs, dealt, strict=True))
    assert sum(dealt) == sum(carried)
    assert min(dealt) >= 1
    assert slowest <= best / 0.9 * (1 + 1e-9)
    assert dealt == tuple(carried) or slowest < 0.9 * max(own) * (1 + 1e-9)
