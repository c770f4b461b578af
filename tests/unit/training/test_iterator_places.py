"""Where generators and iterators stand is told without taking from them, by what they go on with."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
import torch

from paceline.training.checks.iterator_places import NEW, RECEIVES, iterators_among, place_of


def counting() -> Iterator[int]:
    number = 0
    while True:
        yield number
        number += 1


def averaging() -> Iterator[torch.Tensor]:
    mean = torch.zeros(1)
    while True:
        yield mean
        mean = 0.9 * mean + torch.ones(1)


def turning() -> Iterator[str]:
    while True:
        yield "one"
        yield "another"


def through(items: list[int]) -> Iterator[int]:
    while True:
        yield from items


def forgetful() -> Iterator[float]:
    while True:
        drawn = torch.rand(())
        number = float(drawn)
        yield number


def moved(one: Any) -> bool:
    """Return whether the second and the third item are seen to be taken."""
    next(one)
    found = iterators_among([("one", one)])
    before = [place_of(part) for _, part in found]
    assert before == [place_of(part) for _, part in found]
    next(one)
    between = [place_of(part) for _, part in found]
    next(one)
    return before != between and between != [place_of(part) for _, part in found]


@pytest.mark.parametrize(
    "make",
    [
        counting,
        averaging,
        turning,
        lambda: through([1, 2, 3, 4]),
        lambda: iter([1, 2, 3, 4]),
        lambda: iter({1: 2, 3: 4, 5: 6}),
        lambda: zip(itertools.count(), counting(), strict=False),
        lambda: map(str, [1, 2, 3, 4]),
        lambda: (one for one in (1, 2, 3, 4)),
        lambda: itertools.islice(counting(), 9),
    ],
)
def test_what_goes_on_from_where_it_was_has_a_place(make: Callable[[], Any]) -> None:
    assert moved(make())


def mean_of_sent() -> Generator[float, float, None]:
    total = count = 0.0
    while True:
        sent = yield total / max(count, 1)
        total, count = total + sent, count + 1


def sum_of_sent() -> Generator[float, float, None]:
    total = 0.0
    while True:
        total += yield total


def restarting() -> Generator[int, bool | None, None]:
    number = 0
    while True:
        again = yield number
        number = 0 if again else number + 1


@pytest.mark.parametrize("make", [mean_of_sent, sum_of_sent])
def test_one_that_is_sent_what_the_loop_has_is_told_from_one_that_is_taken_from(
    make: Callable[[], Generator[float, float, None]],
) -> None:
    one = make()
    next(one)
    for number in range(3):
        one.send(float(number))
        assert place_of(one) == RECEIVES
    assert moved(restarting())


@pytest.mark.parametrize(
    "make",
    [
        forgetful,
        itertools.count,
        lambda: iter(range(9)),
        lambda: itertools.cycle("-|"),
        lambda: enumerate("abc"),
    ],
)
def test_what_only_counts_or_goes_on_with_nothing_has_none(make: Callable[[], Any]) -> None:
    assert not moved(make())


def test_a_generator_at_its_beginning_and_at_its_end() -> None:
    one = through([1])
    assert place_of(one) == NEW
    next(one)
    assert place_of(one) != NEW
    one.close()  # type: ignore[attr-defined]
    assert place_of(one) == "at its end"


def test_a_generator_that_runs_is_left_out() -> None:
    found = []

    def running() -> Iterator[int]:
        found.extend(iterators_among([("itself", itself), ("around", around)]))
        yield 1

    itself = running()
    around = zip(itself, counting(), strict=False)
    next(around)
    assert [(name, type(one).__name__) for name, one in found] == [("around", "generator")]
