"""Real processes, stuck in real ways, looked at from outside."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from paceline.launch.health.diagnosis import HangWatch, LocalWorker, look, process_state
from paceline.observe.verdict import Collective, judge
from paceline.world import stacks
from paceline.world.status_page import OperationKind, Phase, Reading, StatusPage, StatusPageReader
from tests.patience import HANG_S

NEVER_S = 600
DIGITS = f"""\
import ctypes, sys, time
from paceline.world import stacks
from paceline.world.status_page import OperationKind, Phase, StatusPage

class Digits:
    def __getitem__(self, index):
        time.sleep({NEVER_S})

def spin():
    while True:
        pass

def hold_the_interpreter():
    while True:
        ctypes.PyDLL(None).sleep({NEVER_S})

status_page = StatusPage(int(sys.argv[2]))
stacks.register(int(sys.argv[3]))
stacks.attend(status_page)
status_page.begin(OperationKind.STEP, 40)
status_page.batch()
status_page.end()
status_page.begin(OperationKind.STEP, 41)
if sys.argv[1] == "data":
    status_page.enter(Phase.DATA)
    Digits()[0]
status_page.batch()
if sys.argv[1] == "spin":
    spin()
if sys.argv[1] == "hold":
    hold_the_interpreter()
status_page.enter(Phase.COMMUNICATION)
time.sleep({NEVER_S})
"""
TRAIN = f"""\
import sys, time
import torch
import torch.distributed as dist
from paceline.world import stacks
from paceline.world.status_page import OperationKind, Phase, StatusPage

rank = int(sys.argv[1])
status_page = StatusPage(int(sys.argv[2]))
stacks.register(int(sys.argv[3]))
stacks.attend(status_page)
status_page.enter(Phase.STARTING)
dist.init_process_group("gloo", init_method="file://" + sys.argv[4], rank=rank, world_size=2)
dist.all_reduce(torch.ones(1))
while stacks.flight_record():  # a thread of gloo's takes it off the list, a moment later
    time.sleep(0.01)
status_page.begin(OperationKind.STEP, 7)
if rank == 1:
    status_page.enter(Phase.IDLE)
    time.sleep({NEVER_S})
status_page.enter(Phase.COMMUNICATION)
dist.all_gather([torch.zeros(1), torch.zeros(1)], torch.ones(1))
"""


@contextmanager
def started(rank: int, script: Path, *arguments: str) -> Iterator[LocalWorker]:
    """Start a script with a status page and a file for its stacks; kill it afterwards."""
    status_page, file = StatusPage.create(), stacks.create()
    command = [sys.executable, str(script), arguments[0], str(status_page), str(file), *arguments[1:]]
    reader = StatusPageReader(status_page)
    with subprocess.Popen(command, pass_fds=[status_page, file]) as process:
        try:
            yield LocalWorker(rank=rank, host="here", pid=process.pid, status_page=reader, stacks=file)
        finally:
            process.kill()
            process.wait()
            reader.close()
            os.close(status_page)
            os.close(file)


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def wait_until_silent(members: list[LocalWorker], watch: HangWatch) -> None:
    """Wait until the watch would raise the alarm."""
    wait_until(lambda: watch.overdue({one.rank: one.status_page.read() for one in members}, time.monotonic()))


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    path = tmp_path / "digits.py"
    path.write_text(DIGITS)
    return path


def line_of(text: str, script: str = DIGITS) -> int:
    return next(number for number, line in enumerate(script.splitlines(), 1) if text in line)


def test_a_worker_stuck_in_its_data_set(digits: Path) -> None:
    watch = HangWatch(0.3)
    with started(0, digits, "wait") as first, started(1, digits, "data") as second:
        wait_until(lambda: first.status_page.read().phase is Phase.COMMUNICATION)
        wait_until(lambda: second.status_page.read().phase is Phase.DATA)
        wait_until_silent([first, second], watch)
        seen = look([first, second], os.kill, watch)
    verdict = judge(seen)
    assert (verdict.kind, verdict.stuck) == ("stuck", (1,))
    assert verdict.sentence.startswith("rank 1 on here never entered the gradient reduction of step 41: for ")
    place = f"at digits.py:{line_of('time.sleep')} in __getitem__ (reading data)"
    assert verdict.sentence.endswith(f"{place}; it has served 1 batches, the others 2."), verdict.sentence
    assert seen[1].threads[0][-1].function == "<module>", "the main thread comes first"
    assert len(seen[1].threads) == 2


@pytest.mark.parametrize(
    ("way", "line", "function"),
    [("spin", "def spin", "spin"), ("hold", "def hold", "hold_the_interpreter")],
)
def test_a_worker_that_never_lets_go_of_the_interpreter_still_shows_its_stack(
    digits: Path, way: str, line: str, function: str
) -> None:
    watch = HangWatch(0.3)
    with started(3, digits, way) as member:
        wait_until(lambda: member.status_page.read().batches == 2)
        wait_until_silent([member], watch)
        (seen,) = look([member], os.kill, watch)
    assert seen.place is not None
    assert seen.place.function == function
    assert seen.place.line - line_of(line) in (1, 2)
    assert judge([seen]).kind == "shared", "alone there is nobody to tell whether it is to blame"
    assert ("running on" in judge([seen]).sentence) == (way == "spin")


def test_a_stopped_worker_is_not_asked(digits: Path) -> None:
    watch = HangWatch(0.3)
    with started(0, digits, "wait") as first, started(1, digits, "wait") as second:
        members = [first, second]
        for one in members:
            wait_until(lambda one=one: one.status_page.read().phase is Phase.COMMUNICATION)
        os.kill(second.pid, signal.SIGSTOP)
        wait_until(lambda: process_state(second.pid) == "T")
        wait_until_silent(members, watch)
        asked = []

        def send(pid: int, number: signal.Signals) -> None:
            asked.append(pid)
            os.kill(pid, number)

        seen = look(members, send, watch)
        verdict = judge(seen)
        os.kill(second.pid, signal.SIGCONT)
    assert asked == [first.pid]
    assert [one.state for one in seen] == ["S", "T"]
    assert (verdict.kind, verdict.stuck) == ("stopped", (1,))
    assert verdict.sentence.startswith("rank 1 on here is stopped (SIGSTOP) in step 41")


def test_a_worker_that_is_not_ready_for_the_signal_survives_the_look(tmp_path: Path) -> None:
    script = tmp_path / "early.py"
    script.write_text(f"import time\ntime.sleep({NEVER_S})\n")
    with started(0, script, "early") as member:
        (seen,) = look([member], os.kill, HangWatch())
        time.sleep(0.1)
        state = process_state(member.pid)
    assert seen.threads == ()
    assert state in "RSD"


def test_a_worker_that_has_ended_is_gone(digits: Path) -> None:
    with started(0, digits, "wait") as member:
        os.kill(member.pid, signal.SIGKILL)
        wait_until(lambda: process_state(member.pid) in "ZX")
        (seen,) = look([member], os.kill, HangWatch())
    assert judge([seen]).sentence.startswith("rank 0 on here is gone")
    assert process_state(member.pid) == "X"


def test_a_collective_that_one_rank_never_enters(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    watch = HangWatch(0.05)
    with ExitStack() as stack:
        meeting = str(tmp_path / "meeting")
        members = [stack.enter_context(started(rank, script, str(rank), meeting)) for rank in range(2)]
        wait_until(lambda: members[0].status_page.read().phase is Phase.COMMUNICATION)
        wait_until(lambda: members[1].status_page.read().phase is Phase.IDLE)
        # The phase begins a moment before torch has started the collective.
        wait_until(lambda: look(members[:1], os.kill, watch)[0].pending)
        wait_until_silent(members, watch)
        seen = look(members, os.kill, watch)
    verdict = judge(seen)
    assert seen[0].pending == (Collective(2, "all_gather", "default_pg"),)
    assert seen[1].pending == ()
    assert (verdict.kind, verdict.stuck) == ("stuck", (1,))
    assert verdict.sentence.startswith(
        "rank 1 on here never entered the gradient reduction of step 7, all_gather (collective 2): for "
    )
    place = f"at train.py:{line_of(f'time.sleep({NEVER_S})', TRAIN)} in <module> (between steps)"
    assert place in verdict.sentence


def reading(phase: Phase = Phase.COMPUTE, since: float = 0.0, **changes: object) -> Reading:
    made = Reading(
        phase=phase,
        since=since,
        touched=0.0,
        operation=5,
        kind=OperationKind.STEP,
        step=4,
        batches=5,
        steps=4,
        data_s=0.0,
        compute_s=0.0,
        communication_s=0.0,
        longest_s=1.0,
    )
    return dataclasses.replace(made, **changes)


def test_a_worker_is_overdue_after_the_time_out() -> None:
    watch = HangWatch(60.0)
    waiting, stuck = reading(Phase.COMMUNICATION, since=90.0), reading(Phase.DATA, since=40.0)
    assert not watch.overdue({0: waiting, 1: stuck}, 99.9)
    assert watch.overdue({0: waiting, 1: stuck}, 100.0)


def test_a_stall_that_all_share_starts_the_measure_anew_until_the_last_has_come_out() -> None:
    watch = HangWatch(60.0)
    still, moved = reading(Phase.DATA, since=10.0), reading(Phase.COMMUNICATION, since=100.0)
    group = dict.fromkeys(range(3), still)
    assert watch.overdue(group, 70.0)
    watch.excuse(group, 70.0)
    assert watch.limit_s(still) == 120.0
    assert not watch.overdue(group, 129.0)
    assert not watch.overdue({**group, 0: moved}, 129.5), "one has come out, so the others may well"
    assert not watch.overdue({**group, 0: moved}, 189.0)
    assert watch.overdue({**group, 0: moved}, 189.5)
    later = {**group, 1: dataclasses.replace(still, since=150.0)}
    assert watch.limit_s(later[1]) == 60.0


def test_the_time_out_adapts_to_the_longest_step_of_the_run() -> None:
    watch = HangWatch(60.0)
    assert not watch.overdue({0: reading(longest_s=20.0)}, 199.9)
    assert watch.overdue({0: reading(longest_s=20.0)}, 200.0)
    assert not watch.overdue({0: reading(longest_s=0.0)}, 199.9), "a new process has seen none, the run has"
    assert not watch.overdue({}, 1000.0)


@pytest.mark.parametrize(
    "unusual",
    [
        {"steps": 0},
        {"phase": Phase.STARTING},
        {"phase": Phase.COMPILE},
        {"kind": OperationKind.SAVE, "phase": Phase.COMPUTE},
    ],
)
def test_what_takes_longer_than_a_step_has_longer(unusual: dict[str, object]) -> None:
    watch = HangWatch(60.0)
    slow = dataclasses.replace(reading(), **unusual)
    waiting = reading(Phase.COMMUNICATION)
    assert not watch.overdue({0: slow, 1: waiting}, 599.0), "nor is who waits for it overdue"
    assert watch.overdue({0: slow, 1: waiting}, 600.0)


def test_all_wait_only_when_the_last_one_does() -> None:
    watch = HangWatch(60.0)
    early, late = reading(Phase.COMMUNICATION, since=0.0), reading(Phase.COMMUNICATION, since=30.0)
    assert not watch.overdue({0: early, 1: late}, 89.0)
    assert watch.overdue({0: early, 1: late}, 90.0)


@pytest.mark.parametrize("phase", [Phase.QUIET, Phase.ENDED])
def test_who_does_not_train_is_not_watched(phase: Phase) -> None:
    watch = HangWatch(60.0)
    assert not watch.overdue({0: reading(phase)}, 1e6)
    assert watch.overdue({0: reading(phase), 1: reading(Phase.COMMUNICATION)}, 1e6)


def test_nobody_is_judged_while_the_end_of_one_is_on_its_way() -> None:
    watch = HangWatch(60.0)
    group = {0: reading(Phase.ENDED, since=98.0), 1: reading(Phase.COMMUNICATION, since=0.0)}
    assert not watch.overdue(group, 100.0)
    assert watch.overdue(group, 102.0)
