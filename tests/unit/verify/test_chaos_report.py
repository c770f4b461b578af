"""What a chaos run leaves behind, and what is made of it."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from paceline.observe.events import CheckpointSaved, Event, Regrouped, RunFinished, RunStarted, StepFinished
from paceline.records.ledger import Ledger
from paceline.verify.chaos.faults import DISK, JOIN, KILL, LEAVE, SLOW, STOP, Fault, Mark, Marks
from paceline.verify.chaos.report import ChaosReport, Injection, quantiles
from paceline.verify.chaos.timeline import Timeline, steps_redone
from paceline.world.fault_points import BACKWARD, CHECKPOINT, DATA


def fault(number: int = 0, kind: str = KILL, **changes: Any) -> Fault:
    return Fault(**{"number": number, "kind": kind, "point": BACKWARD, "step": 5, "rank": 1, **changes})


def mark(number: int = 0, time: float = 10.0) -> Mark:
    return Mark(number=number, step=5, rank=1, pid=77, time=time)


def report(**changes: Any) -> ChaosReport:
    facts: dict[str, Any] = {
        "task": "digits",
        "strategy": "ddp",
        "workers": 3,
        "shards": 4,
        "steps": 40,
        "seed": 1,
        "injections": (
            Injection(fault=fault(), mark=mark(), seconds=0.1),
            Injection(fault=fault(1), mark=mark(1), seconds=0.3),
            Injection(fault=fault(2, DISK, point=CHECKPOINT), mark=mark(2), seconds=0.02),
        ),
        "undisturbed_sha256": "a" * 64,
        "weights_sha256": "a" * 64,
        "steps_redone": 2,
        "samples": 2560,
        "assert_same": True,
    }
    return ChaosReport(**{**facts, **changes})


# Marks.


def test_a_fault_is_claimed_once_however_many_try(tmp_path: Path) -> None:
    marks = Marks(tmp_path)
    assert not marks.has(3)
    with ThreadPool(8) as pool:
        won = pool.map(lambda rank: (rank, marks.claim(fault(3), 17, rank)), range(8))
    (winner,) = [rank for rank, claimed in won if claimed]
    assert marks.has(3)
    assert (marks.read()[3].rank, marks.read()[3].step) == (winner, 17)
    assert [path.name for path in tmp_path.iterdir()] == ["3.json"]


# Times.


def step(time: float, number: int = 0) -> Event:
    return StepFinished(number, 0, 1.0, 8, 0.1, 0.1, time=time)


def regrouped(time: float) -> Event:
    return Regrouped(1, 2, 5, "rank 1 was killed", 0.05, time=time)


def started(time: float) -> Event:
    return RunStarted("t", "ddp", 3, 3, "bitwise", "cpu", "gloo", 1, 8, 8, 9, None, 0, "", time=time)


@pytest.mark.parametrize("kind", [KILL, STOP, LEAVE])
def test_a_lost_worker_counts_until_a_step_of_the_group_after_it(kind: str) -> None:
    # The others finish the step at 10.1 without noticing.
    seen = [step(9.9), step(10.1), regrouped(10.5), step(10.75), step(10.9)]
    assert Timeline(seen).recovery(fault(kind=kind), mark()) == pytest.approx(0.75)
    over = [step(9.9), started(12.0), step(12.25)]
    assert Timeline(over).recovery(fault(kind=kind), mark()) == pytest.approx(2.25)


def test_what_takes_no_worker_counts_until_the_next_step() -> None:
    seen = Timeline([step(9.9), step(10.25), regrouped(10.5), step(10.75)])
    assert seen.recovery(fault(kind=DISK), mark()) == pytest.approx(0.25)
    assert seen.recovery(fault(kind=JOIN, point=DATA), mark()) == pytest.approx(0.25)
    assert seen.recovery(fault(kind=SLOW, seconds=0.5), mark()) == pytest.approx(0.75)


def test_a_fault_after_the_last_step_is_recovered_from_when_the_run_ends_well() -> None:
    assert Timeline([step(9.9)]).recovery(fault(), mark()) is None
    assert Timeline([step(9.9), RunFinished({}, time=10.5)]).recovery(fault(), mark()) == pytest.approx(0.5)


def test_a_run_that_falls_behind_its_own_checkpoint_is_told() -> None:
    kept = CheckpointSaved(4, "", 0.1, time=10.2)
    assert Timeline([started(9.0), kept, regrouped(10.5)]).set_back == []  # from step 5 on
    (told,) = Timeline([started(9.0), kept, regrouped(10.5), started(12.0)]).set_back
    assert told == "the run went back to step 0, though it had a checkpoint of step 4"


def test_steps_begun_again_are_counted_from_the_ledgers(tmp_path: Path) -> None:
    served = [
        SimpleNamespace(index=0, samples=np.arange(3)),
        SimpleNamespace(index=1, samples=np.arange(3, 5)),
    ]
    for rank, shard in enumerate(served):
        ledger = Ledger(tmp_path, rank, 0)
        for number in range(4):
            ledger.step(number, 0, number, [shard])
        if rank == 0:  # its peer is lost in step 3, and all is its own from there on
            ledger.generation = 1
            for number in (3, 4):
                ledger.step(number, 0, number, served)
        ledger.close()
    assert steps_redone(tmp_path) == 1
    assert steps_redone(tmp_path / "nowhere") == 0


def test_quantiles_are_times_that_were_seen() -> None:
    times = [0.1 * number for number in range(1, 21)]
    seen = [Injection(fault=fault(), mark=mark(), seconds=time) for time in reversed(times)]
    assert quantiles(seen) == {"p50": 1.0, "p95": 1.9, "max": 2.0}
    assert quantiles(seen[:1]) == {"p50": 2.0, "p95": 2.0, "max": 2.0}
    assert quantiles([Injection(fault=fault(), mark=None, seconds=None)]) is None


# The report.


def test_all_is_well_only_if_everything_is() -> None:
    assert report().holds
    lost = Injection(fault=fault(3), mark=mark(3), seconds=None)
    unborn = Injection(fault=fault(3), mark=None, seconds=None)
    for changes in (
        {"injections": (*report().injections, lost)},
        {"injections": (*report().injections, unborn)},
        {"lost": 1},
        {"repeated": 1},
        {"problems": ("the chain is broken",)},
        {"failure": "rank 0 failed", "weights_sha256": None},
        {"weights_sha256": "b" * 64},
    ):
        assert not report(**changes).holds
    assert report(weights_sha256="b" * 64, assert_same=False).holds


def test_the_object_counts_by_kind() -> None:
    unborn = Injection(fault=fault(3, SLOW, seconds=0.2), mark=None, seconds=None)
    told = json.loads(json.dumps(report(injections=(*report().injections, unborn)).as_json()))
    assert (told["faults"], told["injected"], told["recovered"]) == (4, 3, 3)
    assert told["recovery_s"] == {"p50": 0.1, "p95": 0.3, "max": 0.3}
    assert told["kinds"]["kill"] == {
        "faults": 2,
        "injected": 2,
        "recovered": 2,
        "recovery_s": {"p50": 0.1, "p95": 0.3, "max": 0.3},
    }
    assert told["kinds"]["slow"] == {"faults": 1, "injected": 0, "recovered": 0, "recovery_s": None}
    assert (told["same"], told["holds"]) == (True, False)
    assert told["plan"][0]["mark"]["pid"] == 77
    assert told["plan"][3]["mark"] is None


def shown(found: ChaosReport) -> str:
    stream = io.StringIO()
    Console(file=stream, width=200).print(found.render())
    return " ".join(stream.getvalue().split())


def test_a_person_reads_the_same() -> None:
    text = shown(report())
    for words in (
        "digits: ddp on 3 workers, 4 shards, 40 steps, seed 1",
        "kill 2 2 2 100 ms 300 ms 300 ms",
        "disk 1 1 1 20.0 ms",
        "all 3 3 3",
        "2 steps redone, 0 workers replaced; of 2,560 samples 0 lost, 0 repeated",
        "the weights are those of the undisturbed run (aaaaaaaaaaaa)",
    ):
        assert words in text
    assert "NOT" not in text
    unborn = Injection(fault=fault(3, JOIN, point=DATA, workers=1), mark=None, seconds=None)
    text = shown(replace(report(weights_sha256="b" * 64), injections=(unborn,)))
    assert "not injected: join: 1 worker, data, step 5" in text
    assert "the weights are NOT those of the undisturbed run (bbbbbbbbbbbb, not aaaaaaaaaaaa)" in text
    assert "NOT all is well" in text
    assert "the disturbed run failed: no store" in shown(report(failure="no store", weights_sha256=None))
