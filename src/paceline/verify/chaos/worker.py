"""A worker's side of chaos: trains as ever, with a trap at the named points that sets off the faults that are due."""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path
from typing import Any

from paceline.errors import InputError
from paceline.launch.control import order
from paceline.training import trainer
from paceline.training.run import Run, engine_of
from paceline.training.spec import TrainSpec
from paceline.verify.chaos.accomplice import DONE
from paceline.verify.chaos.faults import (
    DISK,
    FREEZE,
    JOIN,
    KILL,
    LATE,
    LAUNCHERS,
    LEAVE,
    SLOW,
    STOP,
    Fault,
    Marks,
)
from paceline.verify.chaos.plan import FaultPlan
from paceline.world.fault_points import CHECKPOINT, DATA, POINTS, REGROUP, set_fault

_SIGNALS = {
    KILL: signal.SIGKILL,
    LATE: signal.SIGKILL,
    STOP: signal.SIGSTOP,
    FREEZE: signal.SIGSTOP,  # until the launcher's process, which stops the others, has all of them go on
    LEAVE: signal.SIGTERM,
}
_STARTED = "started"
ORDER_ATTEMPTS = 50
ORDER_EVERY_S = 0.1


def main(run: Run, spec: TrainSpec, plan: FaultPlan, marks: str) -> dict[str, Any]:
    """Train a task among faults."""
    trap = Trap(run, plan, Marks(Path(marks)))
    trap.start()
    set_fault(trap)
    return trainer.main(run, spec)


class Trap:
    """Called at every named point this worker comes to."""

    def __init__(self, run: Run, plan: FaultPlan, marks: Marks) -> None:
        self._run, self._plan, self._marks = run, plan, marks
        self._waiting = {point: [one for one in plan.faults if one.point == point] for point in POINTS}
        self._generation = -1

    def start(self) -> None:
        """Stand still for a while where this worker replaces one whose replacement is to be late."""
        if not engine_of(self._run).state.waits_to_join:
            return
        for fault in self._plan.faults:
            due = fault.kind == LATE and self._marks.has(fault.number)
            if due and self._marks.claim_part(fault.number, _STARTED):
                time.sleep(fault.seconds)
                return

    def __call__(self, point: str) -> None:
        """Set off what is due here."""
        step = engine_of(self._run).state.position.number
        if point == DATA:
            self._hold_back(step)
        waiting = self._waiting[point]
        for fault in [one for one in waiting if self._is_due(one, step)]:
            waiting.remove(fault)
            if self._marks.claim(fault, step, self._run.world.rank):
                self._set_off(fault)

    def _is_due(self, fault: Fault, step: int) -> bool:
        if fault.point == REGROUP:
            return fault.after is None or self._marks.has(fault.after)
        if fault.kind == DISK and step >= self._plan.steps:
            return False  # the checkpoint of a finished run is what the run is for: its failure is an error
        if fault.point == CHECKPOINT:
            return fault.step <= step  # in whoever writes: under ps that is a server
        world = self._run.world
        return fault.step <= step and fault.rank % world.size == world.rank

    def _set_off(self, fault: Fault) -> None:
        match fault.kind:
            case kind if kind in _SIGNALS:
                os.kill(os.getpid(), _SIGNALS[kind])
            case kind if kind in LAUNCHERS:
                self._marks.await_part(fault.number, DONE)
            case kind if kind == SLOW:
                time.sleep(fault.seconds)
            case kind if kind == DISK:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            case kind if kind == JOIN:
                self._resize(fault.workers)

    def _resize(self, workers: int) -> None:
        """Ask the launcher for another number of workers, as `paceline resize` does."""
        out = engine_of(self._run).state.options.out
        if out is None:
            raise RuntimeError("a chaos run has a folder")
        for attempt in range(ORDER_ATTEMPTS):
            try:
                order(out, {"do": "resize", "workers": workers})
            except InputError:
                # A launcher that has just started all workers over may not have heard yet that they train.
                if attempt + 1 == ORDER_ATTEMPTS:
                    raise
                time.sleep(ORDER_EVERY_S)
            else:
                return

    def _hold_back(self, step: int) -> None:
        """Take it slowly while a worker is missing; but the first step of a new group counts as its recovery."""
        world = self._run.world
        if world.generation != self._generation:
            self._generation = world.generation
        elif world.size < self._plan.workers_at(step):
            time.sleep(self._plan.pause)
