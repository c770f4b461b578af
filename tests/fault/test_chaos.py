"""Real faults in real runs: each goes off where the plan says, and the answer is that of the undisturbed run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.application import app
from paceline.errors import InputError
from paceline.observe.events import Event, Note, Regrouped, RunStarted, WorkerLost, from_json
from paceline.training.spec import TrainSpec
from paceline.verify.chaos.faults import DISK, END, FREEZE, JOIN, KILL, LATE, LEAVE, PIPE, SLOW, STOP, Fault
from paceline.verify.chaos.plan import FaultPlan, PlanRequest
from paceline.verify.chaos.report import ChaosReport
from paceline.verify.chaos.trial import ChaosRequest, disturb
from paceline.world.fault_points import (
    BACKWARD,
    CHECKPOINT,
    DATA,
    EVALUATION,
    FORWARD,
    OPTIMIZER,
    POINTS,
    REDUCTION,
    REGROUP,
)

DENSE = TrainSpec(task="paceline.tasks.dense4096:Dense4096", name="dense4096")
UNSTEADY = """
import os, torch, paceline
from torch import nn

class Unsteady(paceline.Task):
    batch_size = 8
    def model(self): return nn.Linear(3, 1)
    def optimizer(self, model): return torch.optim.SGD(model.parameters(), lr=0.1)
    def train_data(self): return torch.ones(64, 3)
    def loss(self, model, batch):
        return paceline.Loss.mean(model(batch).squeeze(-1) * int.from_bytes(os.urandom(2), "little"))
"""


@pytest.fixture
def chaos(tmp_path: Path) -> Callable[..., tuple[ChaosReport, list[Event]]]:
    """Run a plan; give what was found, and the events of the disturbed run."""

    def run(*faults: Fault, steps: int, spec: TrainSpec = DENSE) -> tuple[ChaosReport, list[Event]]:
        plan = FaultPlan(faults=faults, steps=steps, workers=3, save_every=4, pause=0.2)
        shape = PlanRequest(faults=max(1, len(faults)), steps=steps, workers=3, shards=4, hang_timeout=1.5)
        request = ChaosRequest(spec=spec, folder=tmp_path / "out", plan=shape, threads=1, assert_same=True)
        report, _ = disturb(request, plan)
        lines = (tmp_path / "out" / "disturbed" / "events.jsonl").read_text().splitlines()
        return report, [from_json(line) for line in lines]

    return run


def faults(*told: dict[str, Any]) -> list[Fault]:
    return [Fault(**{"number": number, "rank": 0, **one}) for number, one in enumerate(told)]


def check(report: ChaosReport) -> None:
    """See that every fault went off at or after its step, and that nothing came of it."""
    assert report.failure == ""
    for one in report.injections:
        assert one.mark is not None, f"{one.fault} did not go off"
        assert one.mark.step >= one.fault.step
    assert (report.lost, report.repeated, report.problems) == (0, 0, ())
    assert report.same
    assert report.holds


def test_a_kill_at_every_point(chaos: Callable[..., Any]) -> None:
    at = [DATA, FORWARD, BACKWARD, REDUCTION, OPTIMIZER, CHECKPOINT]
    told = [
        {"kind": KILL, "point": point, "step": 4 + 6 * place, "rank": 0 if point == CHECKPOINT else place % 3}
        for place, point in enumerate(at)
    ]
    # One more where the group that the last kill broke forms again, and one in the evaluation at the end.
    told.append({"kind": KILL, "point": REGROUP, "step": 34, "after": 5})
    told.append({"kind": KILL, "point": EVALUATION, "step": 47, "rank": 1})
    report, events = chaos(*faults(*told), steps=48)
    check(report)
    assert {one.fault.point for one in report.injected} == set(POINTS)
    assert len({one.mark.pid for one in report.injected}) == len(POINTS)
    assert sum(isinstance(event, WorkerLost) for event in events) == len(POINTS)
    assert 4 <= report.steps_redone <= 12
    assert (report.restarts, report.samples) == (len(POINTS), 48 * 128)


def test_every_other_kind(chaos: Callable[..., Any]) -> None:
    report, events = chaos(
        *faults(
            {"kind": SLOW, "point": FORWARD, "step": 3, "rank": 1, "seconds": 0.2},
            {"kind": DISK, "point": CHECKPOINT, "step": 8},
            {"kind": JOIN, "point": DATA, "step": 10, "workers": 4},
            {"kind": LEAVE, "point": BACKWARD, "step": 16, "rank": 2},
            {"kind": JOIN, "point": DATA, "step": 22, "workers": 2},
            {"kind": STOP, "point": REDUCTION, "step": 28, "rank": 1},
            # All at once: nobody is left, and the run goes on from its last checkpoint.
            *({"kind": KILL, "point": OPTIMIZER, "step": 34, "rank": rank} for rank in range(2)),
        ),
        steps=42,
    )
    check(report)
    notes = " ".join(event.text for event in events if isinstance(event, Note))
    assert "No space left on device" in notes
    groups = [event for event in events if isinstance(event, Regrouped)]
    assert 2 in {group.workers for group in groups}
    reasons = " ".join(group.reason for group in groups)
    assert "leaves" in reasons
    assert any(isinstance(event, WorkerLost) and "SIGKILL" not in event.reason for event in events)
    slow = report.injections[0]
    assert slow.seconds is not None
    assert slow.seconds >= slow.fault.seconds


def test_what_the_launchers_own_process_does(
    chaos: Callable[..., Any], capfd: pytest.CaptureFixture[str]
) -> None:
    report, events = chaos(
        *faults(
            {"kind": FREEZE, "point": REDUCTION, "step": 4, "rank": 1, "seconds": 2.2},
            {"kind": LATE, "point": FORWARD, "step": 10, "rank": 2, "seconds": 1.8},
            {"kind": PIPE, "point": BACKWARD, "step": 18, "rank": 1, "seconds": 0.5},
            {"kind": END, "point": DATA, "step": 24, "rank": 2},
            {"kind": END, "point": OPTIMIZER, "step": 30, "rank": 0},
        ),
        steps=36,
    )
    check(report)
    starts = [event.start_step for event in events if isinstance(event, RunStarted)]
    assert len(starts) >= 3
    assert all(step >= 24 for step in starts[-2:])
    frozen = report.injections[0]
    assert frozen.seconds is not None
    assert frozen.seconds >= frozen.fault.seconds
    assert "\0" not in "".join(capfd.readouterr())


def test_what_is_not_well_is_found(chaos: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "unsteady.py").write_text(UNSTEADY)
    spec = TrainSpec(task=f"{tmp_path / 'unsteady.py'}:Unsteady", name="unsteady")
    late = {"kind": KILL, "point": DATA, "step": 1000}
    report, _ = chaos(
        *faults({"kind": SLOW, "point": DATA, "step": 2, "seconds": 0.1}, late), steps=6, spec=spec
    )
    assert [one.mark is not None for one in report.injections] == [True, False]
    assert (report.same, report.holds, report.failure, report.lost) == (False, False, "", 0)


def call(*arguments: str) -> int:
    status: int = app(args=["chaos", *arguments], standalone_mode=False)
    return status


def test_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    asked = ["--workers", "2", "--faults", "2", "--kinds", "kill,slow", "--points", "data", "--steps", "12"]
    where = ["--seed", "3", "--threads", "1", "--out", str(tmp_path / "out")]
    assert call("dense4096", *asked, *where, "--assert-same", "--json") == 0
    out, err = capfd.readouterr()
    told = json.loads(out.splitlines()[-1])
    assert (told["faults"], told["injected"], told["recovered"], told["steps"]) == (2, 2, 2, 12)
    assert (told["lost"], told["repeated"], told["same"], told["holds"]) == (0, 0, True, True)
    assert "note: fault 1 of 2: " in err
    assert "was killed by SIGKILL" in err
    with pytest.raises(InputError, match="already holds a chaos run"):
        call("dense4096", *asked, *where)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--kinds", "kill,explode"], "unknown kind of fault 'explode'"),
        (["--kinds", ","], "names with commas between"),
        (["--points", "bakward"], "unknown point 'bakward'"),
        (["--faults", "0"], "--faults is 0, but must be at least 1"),
        (["--workers", "4", "--shards", "3"], "4 workers for 3 shards"),
        (["--workers", "1"], "chaos needs at least 2"),
        (["--strategy", "single"], "--strategy single is one process. Use --strategy ddp"),
        (["--strategy", "dp"], "--strategy dp is one process"),
        (["--steps", "10"], "20 faults do not fit into 10 steps"),
        (["--hang-timeout", "0"], "--hang-timeout is 0"),
        (["--set", "lr"], "is not KEY=VALUE"),
    ],
)
def test_what_cannot_be_asked_for(arguments: list[str], words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words):
        call("dense4096", "--out", str(tmp_path / "out"), *arguments)
    assert not os.listdir(tmp_path)  # noqa: PTH208
