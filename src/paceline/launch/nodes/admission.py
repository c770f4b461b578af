"""Lets a machine in once it and all others reach each other; the group that trains meanwhile notices nothing of it.

One is tried at a time, so that two that come together are tried against each other, too. A machine that does not come through is
tried again for as long as another may be silent without being given up: perhaps that one is gone, and nobody knows it yet.
"""

from __future__ import annotations

import selectors
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.launch.nodes.reachability import ATTEMPT_S, Attempt, Target
from paceline.launch.nodes.remote_worker_pool import RemoteWorkerPool
from paceline.transport.control import Message
from paceline.transport.router import Peer

ANSWER_S = 2 * ATTEMPT_S
"""How long a machine may take to say whom it reaches."""
AGAIN_S = 1.0
"""How long to wait before a machine is tried again."""


@dataclass(eq=False)
class FollowingMachine:
    """Another machine, from the moment it has said who it is."""

    index: int
    peer: Peer
    name: str
    host: str
    store_address: str
    """Where its workers reach the store."""
    target: Target
    pool: RemoteWorkerPool | None = field(default=None, repr=False)
    """Its workers, once it was let in."""
    sent_away: bool = False
    """Whether it was told to go: nothing that it says counts any more."""


@dataclass
class Verdict:
    """What came of a trial: let in, or, for a reason, not."""

    machine: FollowingMachine
    reason: str | None


@dataclass
class _Trial:
    """One machine, the others, and who has yet to say whom it reaches."""

    number: int
    machine: FollowingMachine
    own: Attempt
    """This machine's attempt to reach it."""
    awaited: set[int]
    deadline: float
    failed: list[str] = field(default_factory=list)


class Admission:
    """Machines that wait to be let in, and the trial of the first."""

    def __init__(
        self,
        own: Target,
        selector: selectors.BaseSelector,
        send: Callable[[FollowingMachine, Message], None],
        *,
        patience_s: float,
    ) -> None:
        self._own, self._selector, self._send, self._patience_s = own, selector, send, patience_s
        self._waiting: dict[FollowingMachine, float] = {}
        """With the moment from which each may be tried."""
        self._since: dict[FollowingMachine, float] = {}
        """When each was tried first."""
        self._trial: _Trial | None = None
        self._trials = 0

    @property
    def due_s(self) -> float:
        """Within how many seconds to look again."""
        return 0.1 if self._trial is not None else AGAIN_S

    def add(self, machine: FollowingMachine) -> None:
        """Have a machine wait for its trial."""
        self._waiting[machine] = 0.0

    def drop(self, machine: FollowingMachine) -> None:
        """Forget a machine that is gone."""
        self._waiting.pop(machine, None)
        self._since.pop(machine, None)
        if self._trial is not None:
            self._trial.awaited.discard(machine.index)
            if self._trial.machine is machine:
                self._end()

    def answered(self, machine: FollowingMachine, number: int, failed: dict[str, str]) -> None:
        """Take note of whom a machine does not reach."""
        trial = self._trial
        if trial is None or trial.number != number or machine.index not in trial.awaited:
            return
        trial.awaited.remove(machine.index)
        trial.failed += [f"{machine.name} does not reach {name} ({why})" for name, why in failed.items()]

    def advance(self, now: float, present: Sequence[FollowingMachine], *, room: bool) -> list[Verdict]:
        """Go on with the trial, or begin the next where there is room for one more; return what came of it."""
        if self._trial is None:
            ready = [one for one, at in self._waiting.items() if now >= at]
            if ready and room:
                self._begin(ready[0], present, now)
            return []
        trial, own = self._trial, self._trial.own.failed(now)
        late = now >= trial.deadline
        if own is None or (trial.awaited and not late):
            return []
        if trial.machine.index in trial.awaited:
            trial.failed.append(f"{trial.machine.name} does not say whom it reaches")
        trial.failed += [f"{self._own.name} does not reach {name} ({why})" for name, why in own.items()]
        self._end()
        return self._judge(trial, now)

    def close(self) -> None:
        """Let go of every descriptor."""
        self._end()

    def _begin(self, machine: FollowingMachine, present: Sequence[FollowingMachine], now: float) -> None:
        self._trials += 1
        del self._waiting[machine]
        self._since.setdefault(machine, now)
        others = [self._own, *(one.target for one in present)]
        self._ask(machine, others)
        for one in present:
            self._ask(one, [machine.target])
        self._trial = _Trial(
            number=self._trials,
            machine=machine,
            own=Attempt([machine.target], self._selector),
            awaited={machine.index, *(one.index for one in present)},
            deadline=now + ANSWER_S,
        )

    def _ask(self, machine: FollowingMachine, targets: Sequence[Target]) -> None:
        wanted = [[one.name, one.address, one.port] for one in targets]
        self._send(machine, {"do": "reach", "trial": self._trials, "targets": wanted})

    def _judge(self, trial: _Trial, now: float) -> list[Verdict]:
        machine = trial.machine
        if trial.failed and now - self._since[machine] < self._patience_s:
            self._waiting[machine] = now + AGAIN_S
            return []
        del self._since[machine]
        return [Verdict(machine, "; ".join(trial.failed) or None)]

    def _end(self) -> None:
        if self._trial is not None:
            self._trial.own.close()
            self._trial = None
