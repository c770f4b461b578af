"""When a run makes no progress on this machine, and what its workers can be seen to do then. No torch."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.observe.verdict import Collective, Frame, WorkerEvidence, parse_stacks
from paceline.world.stacks import SIGNAL
from paceline.world.status_page import (
    PATIENCE,
    STEPS,
    TIMEOUT_S,
    OperationKind,
    Phase,
    Reading,
    StatusPageReader,
)

LAST_WORDS_S = 3.0
"""How long the end of a worker may take to be heard of."""
ANSWER_S = 0.5
"""How long a worker has to show its stacks, and again to tell its pending collectives."""
_SETTLED_S = 0.02
"""A dump that has not grown for so long is complete: it is written in one go."""

Send = Callable[[int, signal.Signals], None]
"""Sends a signal to a worker; as `ForkServer.signal` does."""


@dataclass(frozen=True, kw_only=True)
class LocalWorker:
    """A worker of this machine, as its launcher holds it."""

    rank: int
    host: str
    pid: int
    status_page: StatusPageReader
    stacks: int
    """The file that its stacks are written to."""


class HangWatch:
    """Decides from readings when a run counts as hanging; it learns from the steps it sees."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._longest_s = 0.0
        self._stall_at = self._excused_at = 0.0
        """When workers were last judged to stand still together, and from when on each of them is measured anew."""
        self._stalled = 0
        """How many of them have not moved since."""

    def limit_s(self, reading: Reading) -> float:
        """Return how long a worker may stay silent where it is."""
        limit = max(self._timeout_s, STEPS * self._longest_s)
        unusual = (
            reading.steps == 0
            or OperationKind.SAVE is reading.kind
            or reading.phase in (Phase.STARTING, Phase.COMPILE)
        )
        # One that is stopped will not be done any sooner for being waited for.
        limit = limit * PATIENCE if unusual and not reading.stopped else limit
        return limit + max(0.0, self._excused_at - max(reading.since, reading.touched))

    def excuse(self, readings: Mapping[int, Reading], now: float) -> None:
        """Start to measure anew: up to now workers stood still together, and none of them is to blame."""
        self._stall_at = self._excused_at = now
        self._stalled = self._count_stalled(readings, now)

    def _count_stalled(self, readings: Mapping[int, Reading], now: float) -> int:
        """Count those who have not moved since the stall was judged."""
        return sum(one.silence_s(now) > now - self._stall_at for one in readings.values() if _is_busy(one))

    def overdue(self, readings: Mapping[int, Reading], now: float) -> bool:
        """Return whether the run hangs: give the readings of all ranks that are known, once a second or so.

        Whoever waits for the others may wait for as long as one of those others is within its own limit.
        """
        # A new process has seen no step, and where all are new the last ones of before count.
        self._longest_s = max((one.longest_s for one in readings.values()), default=0.0) or self._longest_s
        still = self._count_stalled(readings, now)
        if still < self._stalled:
            # All come out of a stall, but not in the same moment: whoever is left has as long again.
            self._stalled, self._excused_at = still, now
        training = [one for one in readings.values() if one.phase not in (Phase.QUIET, Phase.ENDED)]
        busy = [one for one in training if _is_busy(one)]
        if any(one.phase is Phase.ENDED and one.silence_s(now) < LAST_WORDS_S for one in readings.values()):
            return False  # why it has ended is on the way, and says more than that the others wait
        late = [one.silence_s(now) >= self.limit_s(one) for one in busy or training]
        return any(late) if busy else bool(late) and all(late)


def _is_busy(reading: Reading) -> bool:
    """Return whether a worker in training does something of its own, and does not only wait for the others."""
    return reading.phase not in (Phase.QUIET, Phase.ENDED) and (
        reading.stopped or reading.phase is not Phase.COMMUNICATION
    )


def look(members: Sequence[LocalWorker], send: Send, watch: HangWatch) -> tuple[WorkerEvidence, ...]:
    """Collect what can be seen of each worker, all of them at once; takes a second at most."""
    # First of all, because a signal may wake what was asleep.
    now = time.monotonic()
    readings = {one.rank: one.status_page.read() for one in members}
    states = {one.rank: process_state(one.pid) for one in members}
    # A stopped process answers nothing, and would do so later, when nobody asks any more.
    answering = [one for one in members if states[one.rank] in "RSD"]
    stacks = _show_stacks([one for one in answering if _catches(one.pid)], send)
    pending = _pending_collectives(answering)
    return tuple(
        WorkerEvidence(
            rank=one.rank,
            host=one.host,
            reading=readings[one.rank],
            silent_s=readings[one.rank].silence_s(now),
            limit_s=watch.limit_s(readings[one.rank]),
            state=states[one.rank],
            threads=stacks.get(one.rank, ()),
            pending=pending.get(one.rank, ()),
        )
        for one in members
    )


def process_state(pid: int) -> str:
    """Return the state of a process as /proc tells it, one letter; X for one that is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "X"
    return text.rpartition(")")[2].split()[0]


def _catches(pid: int) -> bool:
    """Return whether a process has a handler for our signal yet: without one, the signal would end it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    return bool(caught >> (SIGNAL - 1) & 1)


def _show_stacks(members: Sequence[LocalWorker], send: Send) -> dict[int, tuple[tuple[Frame, ...], ...]]:
    before = {one.rank: os.fstat(one.stacks).st_size for one in members}
    for one in members:
        send(one.pid, SIGNAL)
    sizes = dict(before)
    deadline = time.monotonic() + ANSWER_S
    while time.monotonic() < deadline:
        time.sleep(_SETTLED_S)
        now = {one.rank: os.fstat(one.stacks).st_size for one in members}
        if now == sizes and all(now[rank] > before[rank] for rank in now):
            break
        sizes = now
    return {
        one.rank: parse_stacks(
            os.pread(one.stacks, sizes[one.rank] - before[one.rank], before[one.rank]).decode(
                errors="replace"
            )
        )
        for one in members
    }


def _pending_collectives(members: Sequence[LocalWorker]) -> dict[int, tuple[Collective, ...]]:
    questions = [(one, one.status_page.ask()) for one in members]
    found: dict[int, tuple[Collective, ...]] = {}
    deadline = time.monotonic() + ANSWER_S
    while len(found) < len(members) and time.monotonic() < deadline:
        time.sleep(_SETTLED_S / 4)
        for one, question in questions:
            if one.rank not in found and (text := one.status_page.answer(question)) is not None:
                found[one.rank] = tuple(Collective(**entry) for entry in json.loads(text))
    return found
