"""Looks at all workers once a second: who hangs, who lags behind, who should carry less."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.launch.health.diagnosis import HangWatch
from paceline.observe.straggler import CaughtUp, Straggler, StragglerWatch, shares
from paceline.observe.verdict import Evidence, Verdict, judge
from paceline.world.status_page import Reading

EVERY_S = 1.0
Readings = Mapping[int, Reading]
"""What workers are at, by rank."""
Look = Callable[[HangWatch], tuple[Evidence, ...] | None]
"""Collects from all workers what they are doing; None while some have yet to answer."""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What one look has found."""

    verdict: Verdict | None = None
    """Somebody holds the run up."""
    changes: tuple[Straggler | CaughtUp, ...] = ()
    shares: tuple[int, ...] | None = None
    """How the shards would better be dealt."""


class Watch:
    """What the status pages of a group show, over time."""

    def __init__(self, hang_timeout_s: float) -> None:
        self._hang = HangWatch(hang_timeout_s)
        self._pace = StragglerWatch()
        self._every_s = min(EVERY_S, hang_timeout_s / 4)
        self.due = time.monotonic()
        """When to look next."""

    def regrouped(self) -> None:
        """Start to measure anew: ranks and shares have changed."""
        self._pace = StragglerWatch()

    def find(self, everyone: Readings, look: Look, group: Readings, carried: Sequence[int]) -> Findings:
        """Look: at everyone for one who hangs, at the group, when it is whole, for one who is slow."""
        now = time.monotonic()
        verdict = self._verdict(everyone, look, now)
        findings = Findings(verdict=verdict)
        if verdict is None and len(carried) > 1 and len(group) == len(carried):
            changes = tuple(self._stragglers(group, carried, now))
            findings = Findings(changes=changes, shares=self._better_shares(carried))
        self.due = time.monotonic() + self._every_s
        return findings

    def _verdict(self, readings: Readings, look: Look, now: float) -> Verdict | None:
        """Judge, when the workers have made no progress for too long."""
        if not readings or not self._hang.overdue(readings, now):
            return None
        evidence = look(self._hang)
        verdict = None if evidence is None else judge(evidence)
        if verdict is not None and verdict.kind == "shared":
            self._hang.excuse(readings, time.monotonic())  # reported again when it has lasted as long again
        return None if verdict is None or verdict.kind == "slow" else verdict

    def _stragglers(
        self, readings: Readings, carried: Sequence[int], now: float
    ) -> list[Straggler | CaughtUp]:
        """Return who has fallen behind the others, and who has caught up; by the shard, as some carry more than others."""
        measured = {}
        for rank, reading in readings.items():
            shards = carried[rank]
            if not shards:
                continue  # a server, which only ever waits for the others
            measured[rank] = replace(
                reading, data_s=reading.data_s / shards, compute_s=reading.compute_s / shards
            )
        return self._pace.follow(measured, now)

    def _better_shares(self, carried: Sequence[int]) -> tuple[int, ...] | None:
        """Return shares with which the slowest worker ends earlier, where that is worth a change."""
        seen = self._pace.own_s()
        if sorted(seen) != list(range(len(carried))):
            return None
        found = shares([seen[rank] * count for rank, count in enumerate(carried)], carried)
        return None if found == tuple(carried) else found
