"""Looks at all workers once a second: who hangs, who lags behind, who should carry less."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.launch.health.diagnosis import HangWatch
from paceline.observe.straggler import CaughtUp, Straggler, StragglerWatch, shares
from paceline.observe.verdict import Verdict, WorkerEvidence, judge
from paceline.world.status_page import Reading

EVERY_S = 1.0
AGAIN = 0.5
"""What ends a run must be seen a second time, so much of the time-out later; nothing may have moved meanwhile."""
Readings = Mapping[int, Reading]
"""What workers are at, by rank."""
Look = Callable[[HangWatch], tuple[WorkerEvidence, ...] | None]
"""Collects from all workers what they are doing; None while some have yet to answer."""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What one look has found."""

    verdict: Verdict | None = None
    """Somebody holds the run up."""
    changes: tuple[Straggler | CaughtUp, ...] = ()
    shares: tuple[int, ...] | None = None
    """How the shards would better be dealt."""


class GroupWatch:
    """What the status pages of a group show, over time."""

    def __init__(self, hang_timeout_s: float) -> None:
        self._hang = HangWatch(hang_timeout_s)
        self._pace = StragglerWatch()
        self._timeout_s = hang_timeout_s
        self._every_s = min(EVERY_S, hang_timeout_s / 4)
        self._looked = self.due = time.monotonic()
        """When it looked last, and when to look next."""
        self._suspected: tuple[Verdict, float] | None = None
        """What the last look would have judged, and since when."""

    def regrouped(self) -> None:
        """Start to measure anew: ranks and shares have changed."""
        self._pace, self._suspected = StragglerWatch(), None

    def find(self, everyone: Readings, look: Look, group: Readings, carried: Sequence[int]) -> Findings:
        """Look: at everyone for one who hangs, at the group, when it is whole, for one who is slow."""
        now = time.monotonic()
        if now - self._looked > self._every_s + self._timeout_s / 2:
            # This launcher has stood still, and perhaps all of the machine (paused, suspended): so may the workers have.
            self._hang.excuse(everyone, now)
        verdict = self._verdict(everyone, look, now)
        findings = Findings(verdict=verdict)
        if verdict is None and len(carried) > 1 and len(group) == len(carried):
            changes = tuple(self._stragglers(group, carried, now))
            findings = Findings(changes=changes, shares=self._better_shares(carried))
        self._looked = time.monotonic()
        self.due = self._looked + self._every_s
        return findings

    def _verdict(self, readings: Readings, look: Look, now: float) -> Verdict | None:
        """Judge, when the workers have made no progress for too long."""
        if not readings or not self._hang.overdue(readings, now):
            self._suspected = None
            return None
        evidence = look(self._hang)
        verdict = None if evidence is None else judge(evidence)
        if verdict is None:
            return None
        if verdict.kind == "shared":
            self._hang.excuse(readings, time.monotonic())  # reported again when it has lasted as long again
        return verdict if verdict.kind in ("shared", "stopped") else self._confirmed(verdict, readings)

    def _confirmed(self, verdict: Verdict, readings: Readings) -> Verdict | None:
        """Return the verdict where the look before came to the same one, and nobody has moved since.

        Workers that come out of a stall which all of them shared (a machine that was paused, a container that was frozen) look
        for a moment as if they waited for each other, or for one of them.
        """
        now = time.monotonic()
        before, since = self._suspected or (None, now)
        moved = any(one.silence_s(now) < now - since for one in readings.values())
        if verdict.kind == "slow":
            self._suspected = None
        elif before is None or moved or (before.kind, before.stuck) != (verdict.kind, verdict.stuck):
            self._suspected = verdict, now
        elif verdict.stuck or now - since >= AGAIN * self._timeout_s:
            return verdict
        return None

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
