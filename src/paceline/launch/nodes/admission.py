"""Lets a machine in once it and all others reach each other; the group that trains meanwhile notices nothing of it.

Those that come together are tried together, against each other, too: every machine is asked once, not once for each newcomer. Of
two newcomers that do not reach each other the first is let in. A machine that does not come through is tried again for as long as
another may be silent without being given up: perhaps that one is gone, and nobody knows it yet.
"""

from __future__ import annotations

import selectors
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from paceline.launch.nodes.reachability import ATTEMPT_S, ConnectionAttempts, Target
from paceline.launch.nodes.remote_worker_pool import RemoteWorkerPool
from paceline.transport.control import Message
from paceline.transport.router import Peer

ANSWER_S = 2 * ATTEMPT_S
"""How long a machine may take to say whom it reaches."""
AGAIN_S = 1.0
"""How long to wait before a machine is tried again."""
_TOGETHER = 128
"""How many are tried at once: each machine opens as many connections, and may have few descriptors."""


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


@dataclass(frozen=True)
class _Failure:
    """A machine was not reached."""

    index: int
    """Of the one that did not reach it; 0 for this machine."""
    name: str
    unreached: str
    why: str

    def __str__(self) -> str:
        return f"{self.name} does not reach {self.unreached} ({self.why})"


@dataclass
class _Trial:
    """Newcomers, the others, and who has yet to say whom it reaches."""

    number: int
    machines: list[FollowingMachine]
    own: ConnectionAttempts
    """This machine's attempt to reach them."""
    awaited: set[int]
    deadline: float
    failed_by: dict[int, list[_Failure]] = field(default_factory=dict)
    """By the index of who did not reach another. They may be too many to look through for each newcomer."""
    failed_to: dict[str, list[_Failure]] = field(default_factory=dict)
    """By the name of who was not reached."""
    doubtful: dict[int, str] = field(init=False)
    """The names of newcomers that were not let in, by index: nobody has to reach them."""
    present: frozenset[int] = field(init=False)
    """The machines that were let in before."""
    outdated: bool = False
    """Whether one of those has gone since: it may be all that speaks against a newcomer."""

    def __post_init__(self) -> None:
        self.doubtful = {one.index: one.name for one in self.machines}
        self.present = frozenset(self.awaited - self.doubtful.keys())

    def note(self, index: int, name: str, failed: Mapping[str, str]) -> None:
        """Take note of whom a machine does not reach."""
        for unreached, why in failed.items():
            one = _Failure(index, name, unreached, why)
            self.failed_by.setdefault(index, []).append(one)
            self.failed_to.setdefault(unreached, []).append(one)

    def reasons(self, machine: FollowingMachine) -> list[str]:
        """Return what speaks against a newcomer; where nothing does, those behind it have to reach it."""
        name = self.doubtful.pop(machine.index)
        own = [
            one
            for one in self.failed_by.get(machine.index, ())
            if one.unreached not in self.doubtful.values()
        ]
        excused = {machine.index, *self.doubtful}
        others = [one for one in self.failed_to.get(name, ()) if one.index not in excused]
        found = [str(one) for one in (*own, *others)]
        if machine.index in self.awaited:
            found.append(f"{machine.name} does not say whom it reaches")
        if found:
            self.doubtful[machine.index] = name
        return found


class Admission:
    """Machines that wait to be let in, and the trial of the first of them."""

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
            if machine in self._trial.machines:
                self._trial.machines.remove(machine)
            elif machine.index in self._trial.present:
                self._trial.outdated = True
            if not self._trial.machines:
                self._end()

    def answered(self, machine: FollowingMachine, number: int, failed: dict[str, str]) -> None:
        """Take note of whom a machine does not reach."""
        trial = self._trial
        if trial is None or trial.number != number or machine.index not in trial.awaited:
            return
        trial.awaited.remove(machine.index)
        trial.note(machine.index, machine.name, failed)

    def advance(self, now: float, present: Sequence[FollowingMachine], *, room: int) -> list[Verdict]:
        """Go on with the trial, or begin the next with as many as there is room for; return what came of it."""
        if self._trial is None:
            ready = [one for one, at in self._waiting.items() if now >= at]
            if ready and room > 0:
                self._begin(self._together(ready, present)[: min(room, _TOGETHER)], present, now)
            return []
        trial, own = self._trial, self._trial.own.failed(now)
        late = now >= trial.deadline
        if own is None or (trial.awaited and not late):
            return []
        trial.note(0, self._own.name, own)
        self._end()
        return self._judge(trial, now)

    def close(self) -> None:
        """Let go of every descriptor."""
        self._end()

    def _together(
        self, ready: list[FollowingMachine], present: Sequence[FollowingMachine]
    ) -> list[FollowingMachine]:
        """Return the first and those behind it, each by another name: that is how a machine says whom it does not reach."""
        known = {self._own.name, *(one.name for one in present)}
        if ready[0].name in known:
            return ready[:1]
        found: dict[str, FollowingMachine] = {}
        for one in ready:
            if one.name not in known:
                found.setdefault(one.name, one)
        return list(found.values())

    def _begin(
        self, machines: list[FollowingMachine], present: Sequence[FollowingMachine], now: float
    ) -> None:
        self._trials += 1
        targets = [one.target for one in machines]
        here = [self._own, *(one.target for one in present)]
        for place, machine in enumerate(machines):
            del self._waiting[machine]
            self._since.setdefault(machine, now)
            self._ask(machine, [*here, *targets[:place], *targets[place + 1 :]])
        for one in present:
            self._ask(one, targets)
        self._trial = _Trial(
            number=self._trials,
            machines=machines,
            own=ConnectionAttempts(targets, self._selector),
            awaited={one.index for one in (*machines, *present)},
            deadline=now + ANSWER_S,
        )

    def _ask(self, machine: FollowingMachine, targets: Sequence[Target]) -> None:
        wanted = [[one.name, one.address, one.port] for one in targets]
        self._send(machine, {"do": "reach", "trial": self._trials, "targets": wanted})

    def _judge(self, trial: _Trial, now: float) -> list[Verdict]:
        verdicts = []
        for machine in trial.machines:
            reasons = trial.reasons(machine)
            if reasons and (trial.outdated or now - self._since[machine] < self._patience_s):
                self._waiting[machine] = now + AGAIN_S
            else:
                del self._since[machine]
                verdicts.append(Verdict(machine, "; ".join(reasons) or None))
        return verdicts

    def _end(self) -> None:
        if self._trial is not None:
            self._trial.own.close()
            self._trial = None
