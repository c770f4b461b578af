"""Which worker the others wait for, and how shards could be dealt so that they wait less. Pure: fed with readings.

A worker's own time in a step is what it reads and computes. Its time in communication is left out: in a synchronous
step that is mostly waiting for the slowest, so that the fastest worker communicates longest, and from these times
nobody can tell a slow link from a slow peer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from paceline.world.status_page import Reading

SLOWER = 1.5
"""A straggler takes this many times what the others take."""
OVER = 1.25
"""Below this it is none any more: between the two nothing changes."""
MARGIN_S = 0.002
MEASURED_S = 1e-6
"""Own times below this were not measured: nothing is so many times as long as they."""
WINDOW_S = 3.0
WINDOW_STEPS = 5
GAIN = 0.1
"""Dealing shards anew costs a regroup: only for this share of the slowest worker's time."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """A worker that became slower than the others by a margin."""

    rank: int
    times: float
    """How many times the others' own time its own is."""
    waits_for: str
    """data or compute: where more of the excess is."""


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """A worker that was a straggler and is none any more."""

    rank: int


@dataclass(frozen=True, slots=True)
class _Mark:
    time: float
    steps: int
    data_s: float
    compute_s: float


class StragglerWatch:
    """Follows the readings of all workers and tells when one falls behind and when it is back."""

    def __init__(self) -> None:
        self._marks: dict[int, deque[_Mark]] = {}
        self._named: set[int] = set()

    def follow(self, readings: Mapping[int, Reading], now: float) -> list[Straggler | CaughtUp]:
        """Take the readings of one moment, about once a second; give what changed."""
        for rank in self._marks.keys() - readings.keys():
            del self._marks[rank]
        self._named &= readings.keys()
        for rank, reading in readings.items():
            self._mark(rank, reading, now)
        paces = {rank: pace for rank in sorted(readings) if (pace := self._pace(rank)) is not None}
        if len(paces) < len(readings):
            return []
        found = (self._compare(rank, paces) for rank in paces)
        return [change for change in found if change is not None]

    def own_s(self) -> dict[int, float]:
        """Return each worker's own seconds a step just now; only workers whose pace is known."""
        paces = {rank: self._pace(rank) for rank in sorted(self._marks)}
        return {rank: sum(pace) for rank, pace in paces.items() if pace is not None}

    def _mark(self, rank: int, reading: Reading, now: float) -> None:
        marks = self._marks.setdefault(rank, deque())
        if marks and reading.steps < marks[-1].steps:
            marks.clear()  # another process has taken its place
            self._named.discard(rank)
        marks.append(_Mark(now, reading.steps, reading.data_s, reading.compute_s))
        while len(marks) > 2 and _is_enough(marks[1], marks[-1]):
            marks.popleft()

    def _pace(self, rank: int) -> tuple[float, float] | None:
        """Return the seconds of data and of compute a step, over the shortest time that is long enough."""
        marks = self._marks[rank]
        first, last = marks[0], marks[-1]
        if not _is_enough(first, last):
            return None
        steps = last.steps - first.steps
        return (last.data_s - first.data_s) / steps, (last.compute_s - first.compute_s) / steps

    def _compare(self, rank: int, paces: Mapping[int, tuple[float, float]]) -> Straggler | CaughtUp | None:
        others = [pace for other, pace in paces.items() if other != rank]
        if not others:
            return None
        data, compute = paces[rank]
        own, usual = data + compute, median(sum(pace) for pace in others)
        if rank in self._named:
            if own > OVER * usual and own - usual >= MARGIN_S / 2:
                return None
            self._named.discard(rank)
            return CaughtUp(rank)
        if usual < MEASURED_S or own <= SLOWER * usual or own - usual < MARGIN_S:
            return None
        self._named.add(rank)
        more_data = data - median(pace[0] for pace in others)
        more_compute = compute - median(pace[1] for pace in others)
        return Straggler(rank, own / usual, "data" if more_data > more_compute else "compute")


def shares(own_s: Sequence[float], carried: Sequence[int]) -> tuple[int, ...]:
    """Deal the shards so that the slowest worker is done earliest, each with one at least.

    `own_s` is each worker's own time for the `carried` shards it has; it is taken to grow with their number. Gives
    `carried` back where another deal would not gain a tenth of the slowest worker's time.
    """
    costs = [seconds / shards for seconds, shards in zip(own_s, carried, strict=True)]
    dealt = [1] * len(costs)
    for _ in range(sum(carried) - len(costs)):
        ends = [(count + 1) * cost for count, cost in zip(dealt, costs, strict=True)]
        dealt[ends.index(min(ends))] += 1
    slowest = max(count * cost for count, cost in zip(dealt, costs, strict=True))
    return tuple(dealt) if slowest < (1 - GAIN) * max(own_s) else tuple(carried)


def _is_enough(first: _Mark, last: _Mark) -> bool:
    return last.time - first.time >= WINDOW_S and last.steps - first.steps >= WINDOW_STEPS
