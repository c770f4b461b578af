from __future__ import annotations

import math
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from paceline.world.status_page import (
    FADING,
    SIZE,
    NoStatusPage,
    OperationKind,
    Phase,
    Reading,
    StatusPage,
    StatusPageReader,
)
from tests.patience import HANG_S

WRITER = """
import sys, time
from paceline.world.status_page import OperationKind, Phase, StatusPage
status_page = StatusPage(int(sys.argv[1]))
status_page.begin(OperationKind.STEP, 41)
for _ in range(3):
    status_page.batch()
status_page.enter(Phase.DATA)
question = status_page.wait_for_question(0)
status_page.answer(question, b"collective 12")
status_page.wait_for_question(question)
"""


@pytest.fixture
def page() -> Iterator[int]:
    descriptor = StatusPage.create()
    yield descriptor
    os.close(descriptor)


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_page_nobody_writes_to_is_quiet(page: int) -> None:
    reading = StatusPageReader(page).read()
    assert reading.phase is Phase.QUIET
    assert (reading.operation, reading.batches, reading.steps) == (0, 0, 0)


def test_a_step_is_counted_with_its_times(page: int) -> None:
    status_page, reader = StatusPage(page), StatusPageReader(page)
    started = time.monotonic()
    status_page.begin(OperationKind.STEP, 41)
    assert status_page.enter(Phase.DATA) is Phase.COMPUTE
    time.sleep(0.02)
    status_page.batch()
    assert status_page.enter(Phase.COMPUTE) is Phase.DATA
    assert status_page.enter(Phase.COMMUNICATION) is Phase.COMPUTE
    time.sleep(0.01)
    during = reader.read()
    status_page.end()
    after, took = reader.read(), time.monotonic() - started

    assert (during.phase, during.kind, during.step) == (Phase.COMMUNICATION, OperationKind.STEP, 41)
    assert (during.operation, during.batches, during.steps) == (1, 1, 0)
    assert during.own_s == 0.0, "only finished steps are told"
    assert (after.phase, after.kind, after.steps) == (Phase.IDLE, OperationKind.OTHER, 1)
    assert after.data_s >= 0.02
    assert after.communication_s >= 0.01
    assert math.isclose(after.own_s, after.data_s + after.compute_s)
    assert after.own_s + after.communication_s <= took


def test_an_exception_in_the_middle_of_storing_spoils_no_later_reading(page: int) -> None:
    status_page, reader = StatusPage(page), StatusPageReader(page)
    with pytest.raises(TypeError):
        status_page.begin(OperationKind.STEP, "interrupted")  # type: ignore[arg-type]
    assert not reader.read().whole
    status_page.begin(OperationKind.STEP, 7)
    assert (reader.read().whole, reader.read().step) == (True, 7)
    status_page.end()
    assert (reader.read().whole, reader.read().steps) == (True, 1)


def test_a_broken_step_and_an_evaluation_do_not_count(page: int) -> None:
    status_page, reader = StatusPage(page), StatusPageReader(page)
    status_page.begin(OperationKind.STEP, 0)
    time.sleep(0.02)
    started = time.monotonic()
    status_page.begin(OperationKind.STEP, 0)
    status_page.end()
    one, took = reader.read(), time.monotonic() - started
    status_page.begin(OperationKind.EVALUATE, 1)
    time.sleep(0.02)
    status_page.end()
    two = reader.read()

    assert (one.operation, one.steps) == (2, 1)
    assert one.compute_s <= took
    assert (two.operation, two.steps, two.compute_s) == (3, 1, one.compute_s)


def test_the_longest_step_is_not_the_first(page: int) -> None:
    status_page, reader = StatusPage(page), StatusPageReader(page)
    times = []
    for pause in (0.1, 0.01, 0.0):
        started = time.monotonic()
        status_page.begin(OperationKind.STEP, 0)
        time.sleep(pause)
        status_page.end()
        times.append(time.monotonic() - started)
    assert 0.01 * FADING <= reader.read().longest_s <= max(times[1:])


def test_what_a_compiler_took_makes_no_step_longer(page: int) -> None:
    status_page, reader = StatusPage(page), StatusPageReader(page)
    for _ in range(2):
        status_page.begin(OperationKind.STEP, 0)
        before = status_page.enter(Phase.COMPILE)
        time.sleep(0.1)
        status_page.enter(before)
        status_page.end()
    reading = reader.read()
    assert reading.longest_s < 0.1
    assert reading.compute_s >= 0.2


def test_a_slow_step_fades_with_those_after_it(page: int) -> None:
    status_page, reader = StatusPage(page), StatusPageReader(page)
    for pause in (0.0, 0.5, *([0.0] * 200)):
        status_page.begin(OperationKind.STEP, 0)
        time.sleep(pause)
        status_page.end()
    assert reader.read().longest_s < 0.25


def test_silence_is_since_the_last_change(page: int) -> None:
    status_page, reader = StatusPage(page), StatusPageReader(page)
    status_page.enter(Phase.DATA)
    since = reader.read().since
    assert reader.read().silence_s(since + 7.0) == pytest.approx(7.0)
    time.sleep(0.01)
    status_page.batch()
    later = reader.read()
    assert later.since == since
    assert later.silence_s(since + 7.0) < 7.0 - 0.009


def test_a_worker_stopped_while_it_stores_can_still_be_read(page: int) -> None:
    status_page = StatusPage(page)
    status_page.begin(OperationKind.STEP, 5)
    with mmap.mmap(page, SIZE) as memory:
        memory[0] |= 1
    assert StatusPageReader(page).read().step == 5


def test_the_launcher_reads_and_asks_another_process(page: int) -> None:
    reader = StatusPageReader(page)
    with subprocess.Popen([sys.executable, "-c", WRITER, str(page)], pass_fds=[page]) as process:
        try:
            wait_until(lambda: reader.read().phase is Phase.DATA)
            reading = reader.read()
            question = reader.ask()
            wait_until(lambda: reader.answer(question) is not None)
            answer, next_answer = reader.answer(question), reader.answer(question + 1)
            reader.ask()
            assert process.wait(HANG_S) == 0
        finally:
            process.kill()
    assert (reading.kind, reading.step, reading.batches) == (OperationKind.STEP, 41, 3)
    assert reading.silence_s(time.monotonic()) < HANG_S, "both processes have one clock"
    assert (answer, next_answer) == (b"collective 12", None)


def test_an_answer_longer_than_the_page_is_cut(page: int) -> None:
    reader = StatusPageReader(page)
    StatusPage(page).answer(reader.ask(), b"x" * SIZE)
    answer = reader.answer(1)
    assert answer is not None
    assert set(answer) == {ord("x")}
    assert len(answer) < SIZE


def test_without_a_launcher_the_same_calls_do_nothing() -> None:
    status_page = NoStatusPage()
    status_page.begin(OperationKind.STEP, 1)
    assert status_page.enter(status_page.enter(Phase.DATA)) is Phase.QUIET
    status_page.batch()
    status_page.end()


def test_a_reading_is_of_one_moment(page: int) -> None:
    reader = StatusPageReader(page)
    before = reader.read()
    StatusPage(page).enter(Phase.COMPUTE)
    assert isinstance(before, Reading)
    assert (before.phase, reader.read().phase) == (Phase.QUIET, Phase.COMPUTE)
    reader.close()
