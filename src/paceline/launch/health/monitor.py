"""Looks at the workers of all machines, and tells what is to be seen of them."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.launch.health.diagnosis import HangWatch
from paceline.launch.health.watch import Findings, GroupWatch, Readings
from paceline.launch.membership import Membership
from paceline.launch.nodes.inventory import Nodes
from paceline.launch.workers.roster import Roster, RosterEntry
from paceline.observe.events import Straggling
from paceline.observe.straggler import CaughtUp, Straggler
from paceline.observe.verdict import WorkerEvidence


class HealthMonitor:
    """Brings what the machines know of their workers before the watch that judges it."""

    def __init__(self, watch: GroupWatch, nodes: Nodes, roster: Roster, membership: Membership) -> None:
        self._watch, self._nodes = watch, nodes
        self._roster, self._membership = roster, membership

    @property
    def due(self) -> float | None:
        """When to look next; None while nobody trains."""
        return self._watch.due if any(one.running and one.trains for one in self._roster) else None

    def look(self) -> Findings:
        """See whether the workers make progress, and who holds the others up."""
        group = [self._roster[one.number] for one in self._membership.group()]
        return self._watch.find(
            self._readings(one for one in self._roster.running() if one.rank >= 0),
            self._evidence,
            self._readings(group),
            self._membership.carried() if group else (),
        )

    def regrouped(self) -> None:
        """Start to measure anew: ranks and shares have changed."""
        self._watch.regrouped()

    def describe(self, change: Straggler | CaughtUp) -> Straggling:
        """Report for everybody that a worker has fallen behind, or has caught up."""
        entry = next(one for one in self._roster.running() if one.rank == change.rank)
        host, times, waits_for = self._nodes[entry.node].host, 1.0, ""
        if isinstance(change, Straggler):
            times, waits_for = change.times, change.waits_for
        return Straggling(rank=change.rank, host=host, times=times, waits_for=waits_for)

    def place(self, entry: RosterEntry) -> str:
        """Return where in its code a worker is, in words; nothing where that cannot be seen at once."""
        found = self._nodes[entry.node].pool.look({entry.number: entry.rank}, "", HangWatch())
        return f"at {found[0].place}" if found and found[0].place is not None else ""

    def _readings(self, entries: Iterable[RosterEntry]) -> Readings:
        found = {one.rank: self._nodes[one.node].pool.reading(one.number) for one in entries}
        return {rank: reading for rank, reading in found.items() if reading is not None}

    def _evidence(self, watch: HangWatch) -> tuple[WorkerEvidence, ...] | None:
        """Ask all machines at once; the far ones answer later."""
        found: list[tuple[WorkerEvidence, ...] | None] = []
        for node in reversed(list(self._nodes)):
            ranks = {one.number: one.rank for one in self._roster.on(node.index) if one.rank >= 0}
            if None in found and node is self._nodes.own:
                return None  # its workers are shown when the others' are
            found.append(node.pool.look(ranks, node.host, watch) if ranks else ())
        return None if None in found else tuple(one for some in found for one in some or ())
