"""What a disturbed run left behind: when each fault was recovered from, and how many steps were taken again. Imports no torch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from paceline.observe.events import (
    CheckpointSaved,
    Event,
    Regrouped,
    RunFinished,
    RunStarted,
    StepFinished,
    from_json,
)
from paceline.records import ledger
from paceline.training.folder import EVENTS
from paceline.verify.chaos.faults import END, FREEZE, KILL, LATE, LEAVE, SLOW, STOP, Fault, Mark

_LOSING = (KILL, STOP, LEAVE, LATE, END)
"""Faults that take a worker: the others may finish the step without it, and only then notice."""


class Timeline:
    """When the steps of a run were finished, and when its groups formed."""

    def __init__(self, events: Iterable[Event]) -> None:
        seen = sorted(events, key=lambda event: event.time)
        self._steps = [event.time for event in seen if isinstance(event, StepFinished | RunFinished)]
        self._groups = [event.time for event in seen if isinstance(event, Regrouped | RunStarted)]
        self.set_back = _set_back(seen)
        """Where the run went on from before a checkpoint that it had, one line each."""

    @classmethod
    def read(cls, run: Path) -> Timeline:
        """Read a run folder's events; a run that was refused at its start has none."""
        path = run / EVENTS
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return cls(from_json(line) for line in lines)

    def recovery(self, fault: Fault, mark: Mark) -> float | None:
        """Return the seconds from a fault to the next step finished; where it took a worker, by the group after it."""
        stands = fault.kind in (SLOW, FREEZE)  # in the others training goes on
        since = mark.time + (fault.seconds if stands else 0.0)
        if fault.kind in _LOSING:
            # Without a group after it the run came to its end with those that were left.
            since = next(iter(self._groups[bisect_right(self._groups, since) :]), since)
        place = bisect_right(self._steps, since)
        return self._steps[place] - mark.time if place < len(self._steps) else None


def _set_back(seen: Iterable[Event]) -> list[str]:
    kept, told = 0, []
    for event in seen:
        match event:
            case CheckpointSaved(step=step):
                kept = step
            case RunStarted(start_step=begun) | Regrouped(step=begun) if begun < kept:
                told.append(f"the run went back to step {begun}, though it had a checkpoint of step {kept}")
    return told


def steps_redone(run: Path) -> int:
    """Count the steps that were begun once more, by what the ledgers hold of each generation."""
    records = [ledger.read(path)[["generation", "number"]] for path in ledger.paths(run).values()]
    if not records:
        return 0
    begun = np.unique(np.concatenate(records))
    return len(begun) - len(np.unique(begun["number"]))
