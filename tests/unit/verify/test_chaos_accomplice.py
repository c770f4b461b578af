"""What the launcher's own process does in a chaos run: several faults may last at once, and everything is put back."""

import contextlib
import json
import subprocess
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from paceline.verify.chaos.accomplice import DONE, Accomplice, _stopped
from paceline.verify.chaos.faults import FREEZE, PIPE, Fault, Mark, Marks
from paceline.verify.chaos.plan import FaultPlan
from paceline.world.fault_points import DATA
from tests.patience import HANG_S


@pytest.fixture
def child():
    """A process that does nothing until it is ended."""
    made = subprocess.Popen(["/bin/sleep", "600"])
    yield made.pid
    made.kill()
    made.wait()


def state_of(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def wait_for(condition):
    until = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_stopped_worker_goes_on_whatever_is_raised_meanwhile(child):
    with contextlib.suppress(OSError), _stopped(child):
        wait_for(lambda: state_of(child) == "T")
        raise OSError("full")
    wait_for(lambda: state_of(child) != "T")


def test_a_fault_goes_off_while_one_of_another_kind_lasts(child, tmp_path):
    marks = Marks(tmp_path)
    kinds = (PIPE, FREEZE, PIPE)
    faults = tuple(
        Fault(number=number, kind=kind, point=DATA, step=number, seconds=HANG_S)
        for number, kind in enumerate(kinds)
    )
    plan = FaultPlan(faults=faults, steps=9, workers=1, save_every=1)
    with Accomplice(plan, marks, tmp_path):
        for number in range(len(kinds)):
            mark = Mark(number=number, step=number, rank=0, pid=child, time=0.0)
            partial = tmp_path / "partial"
            partial.write_text(json.dumps(asdict(mark)))
            partial.rename(tmp_path / f"{number}.json")
            wait_for((tmp_path / f"{number}.{DONE}").exists)
        assert state_of(child) == "T"
    wait_for(lambda: state_of(child) != "T")
