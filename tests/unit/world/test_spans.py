"""Spans: nothing until somebody measures them, then one measurement for each time a span is entered."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from paceline.world import spans


@pytest.fixture
def moments() -> Iterator[list[str]]:
    seen: list[str] = []

    @contextmanager
    def measure(name: str) -> Iterator[None]:
        seen.append(f"{name} begins on {threading.current_thread().name}")
        try:
            yield
        finally:
            seen.append(f"{name} ends on {threading.current_thread().name}")

    spans.set_measure(measure)
    yield seen
    spans.set_measure(None)


def test_a_span_inside_itself_is_measured_twice(moments: list[str]) -> None:
    with spans.of[spans.DATA], spans.of[spans.DATA]:
        pass
    here = threading.current_thread().name
    assert moments == [f"data {what} on {here}" for what in ("begins", "begins", "ends", "ends")]


def test_each_thread_ends_its_own_span_and_an_error_goes_through(moments: list[str]) -> None:
    def other() -> None:
        with spans.of[spans.WAITING]:
            pass

    def fail() -> None:
        with spans.of[spans.WAITING]:
            thread = threading.Thread(target=other, name="other")
            thread.start()
            thread.join()
            raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        fail()
    assert [moment.split(" on ")[1] == "other" for moment in moments] == [False, True, True, False]


def test_nothing_is_measured_once_nobody_asks(moments: list[str]) -> None:
    with spans.of[spans.BACKWARD]:
        spans.set_measure(None)  # what is open still ends
    with spans.of[spans.BACKWARD]:
        pass
    assert [moment.split()[1] for moment in moments] == ["begins", "ends"]
    assert list(spans.each(spans.DATA, [1, 2])) == [1, 2]
