"""The machines of a run as the leading launcher counts them: who works where, and where a newcomer is to work."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from paceline.launch.health.diagnosis import HangWatch
from paceline.launch.job import Job
from paceline.observe.verdict import WorkerEvidence
from paceline.world.status_page import Reading

LEADER = 0


class WorkerPool(Protocol):
    """The worker processes of one machine, near or far."""

    def start(self, number: int, job: Job, log_name: str) -> None:
        """Ask for one worker."""

    def send(self, number: int, message: bytes) -> None:
        """Send a worker a message; one that is gone does not get it."""

    def signal(self, number: int, signal_number: signal.Signals) -> None:
        """Send a worker a signal; one that has ended is left alone."""

    def show(self, number: int) -> None:
        """Show what this worker writes: it has rank 0."""

    def pid(self, number: int) -> int | None:
        """Return a worker's process id, once it is there."""

    def reading(self, number: int) -> Reading | None:
        """Return what a running worker is at; None for one that is not there."""

    def look(
        self, ranks: Mapping[int, int], host: str, watch: HangWatch
    ) -> tuple[WorkerEvidence, ...] | None:
        """Have workers, given with their ranks, show what they are at; None while they have yet to answer."""

    def write_log(self, number: int, text: str) -> None:
        """Add a line to a worker's log."""

    def restart(self) -> None:
        """End every worker, and be ready to start others; nobody is told."""


@dataclass
class Node:
    """One machine of the run."""

    index: int
    host: str
    pool: WorkerPool
    store_address: str
    """Where its workers reach the store."""
    wanted: int
    """How many workers it is to have."""
    due: int = 0
    """How many of them are to be started as soon as there is a group that they can join."""


class Nodes:
    """All machines that are there, the leader's own first."""

    def __init__(self, own: Node) -> None:
        self._nodes = {own.index: own}

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def __len__(self) -> int:
        return len(self._nodes)

    def __getitem__(self, index: int) -> Node:
        return self._nodes[index]

    def get(self, index: int) -> Node | None:
        """Return a machine, or None for one that is gone."""
        return self._nodes.get(index)

    def add(self, node: Node) -> None:
        """Count in a machine that came."""
        self._nodes[node.index] = node

    def drop(self, index: int) -> Node | None:
        """Count out a machine that is gone; None where it was never counted in."""
        return self._nodes.pop(index, None)

    @property
    def own(self) -> Node:
        """The machine of this launcher."""
        return self._nodes[LEADER]

    @property
    def wanted(self) -> int:
        """How many workers all of them are to have."""
        return sum(node.wanted for node in self)

    def keep(self, staying: Mapping[int, int]) -> None:
        """Want of each machine what stays there, given by machine."""
        for node in self:
            node.wanted = staying.get(node.index, 0)

    def place(self, there: Mapping[int, int]) -> Node:
        """Choose where to start one more worker: where most are missing, or else where fewest are; `there` counts them."""
        short = max(self, key=lambda node: (node.wanted - there.get(node.index, 0), -node.index))
        if short.wanted > there.get(short.index, 0):
            return short
        chosen = min(self, key=lambda node: (there.get(node.index, 0), node.index))
        chosen.wanted = there.get(chosen.index, 0) + 1
        return chosen
