"""Decides who belongs to the group: one path for a worker that dies, hangs, leaves or joins.

A state machine without processes, sockets or clocks of its own: it is told what happened and answers with what to do.
A change goes like this: everybody is told to leave the group (at once when somebody is gone, at the next step when
somebody joins or leaves); each says where it stands; when all have, each is given its place in the next group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

from paceline.launch import failures
from paceline.launch.actions import (
    Action,
    Assign,
    AwaitCause,
    Begin,
    Break,
    Expel,
    GiveUp,
    Release,
    Say,
    Start,
    StartOver,
    Tell,
)
from paceline.launch.attempts import LIMIT, Attempts
from paceline.launch.code_errors import CodeError, CodeErrors
from paceline.launch.deadly_steps import DeadlySteps
from paceline.launch.failures import WorkerFailure
from paceline.launch.member import Member, State
from paceline.launch.policy import Policy
from paceline.observe import formats
from paceline.recovery.membership import BODY, SAVE_ASKED, STATE_LOST, STEP, Standing
from paceline.world.status_page import PATIENCE

REFILL_S = 60.0
"""After so many seconds one replacement more is allowed again, up to --max-restarts."""
STARTS = 3
"""A worker that joins may take this many times as long to start as the slowest of the first."""


_TIMED = (State.RELEASED, State.STARTING)
"""Who may be given a time in which to be further."""
_UNRETURNED = (
    " where another worker has returned already: nobody is left to go on with it, and what it would have returned is lost. "
    "Where the run has saved, call again with resume=True"
)
"""What follows the death of a worker at the end of a function of the user's."""


class Membership:
    """All workers of a run, through all its generations."""

    def __init__(self, policy: Policy, clock: Callable[[], float]) -> None:
        self.policy = policy
        self.target = policy.workers
        self.generation = 0
        self.restarts = 0
        self.members: dict[int, Member] = {}
        self._clock = clock
        self._tokens, self._counted = float(policy.max_restarts), clock()
        self._trains = policy.trains
        self._formed = 0
        """How many the present group began with, and are yet to be replaced in it."""
        self._asked = 0
        """How many newcomers were asked for and are not counted in yet: what asks for them goes on deciding."""
        self._awaited: Member | None = None
        """Somebody who had yet to leave the group when that was asked last."""
        self.changing = False
        """Whether the next group has yet to form."""
        self.stopping = False
        """Whether the next group is the last: it saves a checkpoint and ends."""
        self._saving = False
        """Whether the next group saves a checkpoint before it goes on."""
        self._complete = False
        self._reasons: list[str] = []
        self._shares: tuple[int, ...] | None = None
        self._dealt: tuple[int, ...] | None = None
        """The shares that are wanted, and those of the present group."""
        self._failures: list[WorkerFailure] = []
        """What was lost since the last step that all finished: their causes, should it come to an end."""
        self._unexplained = False
        """Whether the first group never came to be, and nobody has said why."""
        self._code = CodeErrors()
        self._attempts = Attempts()
        self._retry_at: float | None = None
        """When the next group is tried, where the last ones came to nothing."""
        self._deadly = DeadlySteps()
        self._starts = 0
        """How often all were started over."""
        self._longest_start_s = 0.0

    # What happens.

    def add(self, number: int, *, rank: int | None, host: int = 0) -> None:
        """Count in a worker that is being started: with its rank in the first group, or none to join later."""
        at = -1 if rank is None else rank
        self.members[number] = Member(
            number, host, rank=at, place=at, newcomer=rank is None, since=self._clock()
        )
        self._formed += rank is not None
        self._asked -= rank is None and self._asked > 0

    def began(self, number: int) -> list[Action]:
        """A first worker has entered training."""
        self._trains = True
        self._longest_start_s = max(self._longest_start_s, self._clock() - self.members[number].since)
        self.members[number].state = State.TRAINING
        return self._tell(at_once=False) if self.stopping and not self.changing else []

    def met(self, number: int) -> list[Action]:
        """A worker of a role has met the others; nobody begins before all have, so nobody is lost in between."""
        self.members[number].state = State.TRAINING
        if any(one.state is State.STARTING for one in self.members.values()):
            return []
        return [Begin(one.number) for one in self._in_group()]

    def ready(self, number: int) -> list[Action]:
        """A worker that is to join has prepared everything and waits."""
        if self.members[number].state is State.RELEASED:
            return []
        self.members[number].state = State.WAITING
        self._reasons.append("a worker joins")
        if self.changing:
            return self._form_when_ready()
        return self._tell(at_once=False) if self._has_place() else []

    def broken(self, number: int, standing: Standing) -> list[Action]:
        """A worker has left its group, of itself or because it was told to."""
        member = self.members[number]
        member.state, member.standing = State.BROKEN, standing
        self._attempts.report(number, standing.error)
        actions: list[Action] = []
        if not self.changing:
            self.changing = True
            # Whoever joins or leaves is waited for; else somebody is gone, and everybody should know now.
            actions = self._tell(at_once=not self._planned())
        return actions + self._form_when_ready()

    def lost(self, number: int, failure: WorkerFailure, step: int | None = None) -> list[Action]:
        """A worker has ended, and not well."""
        member = self.members[number]
        was, member.state = member.state, State.ENDED
        if was in (State.RELEASED, State.ENDED):
            return []
        # One that was to join found no room for its records on a full disk; those that train have theirs.
        outside = member.newcomer and was in (State.STARTING, State.WAITING)
        ends = failure.kind == "input" or (failure.kind == "disk" and not outside)
        if ends or not self.policy.elastic:
            return self._do_without(member, self._cause_of(failure))
        if (end := self._dies_again(member, failure, was)) is not None:
            return [GiveUp(end)]
        if outside:
            return self._lost_newcomer(failure)
        return self._lost_from_group(member, failure, step)

    def _lost_from_group(self, member: Member, failure: WorkerFailure, step: int | None) -> list[Action]:
        self._failures.append(failure)
        if any(one.state is State.STARTING and not one.newcomer for one in self.members.values()):
            # The first group never came to be.
            return self._failed_start(failure)
        self._reasons.append(f"rank {member.rank} {failure.cause()}")
        replacing = self._replace()
        if failure.of_code and (end := self._end_of_retries(member, failure, step)) is not None:
            return [GiveUp(end)]
        self.changing = True
        return self._tell(at_once=True) + replacing + self._form_when_ready()

    @property
    def due(self) -> float | None:
        """When something is to be decided though nothing has happened; None where nothing is."""
        # Asked at every turn of the launcher's loop, with thousands of members of whom hardly any is to do something in time.
        watched = [one for one in self.members.values() if one.state in _TIMED]
        times = [limit for one in watched if (limit := self._deadline(one)) is not None]
        return min(times if self._retry_at is None else [*times, self._retry_at], default=None)

    def tick(self) -> list[Action]:
        """Time has passed: try what was put off, and expel whoever has not done in time what it was to do."""
        now = self._clock()
        if self._retry_at is not None and now >= self._retry_at:
            self._retry_at = None
            return self._form_when_ready()
        for member in self.members.values():
            limit = self._deadline(member)
            if limit is not None and now >= limit:
                words = f"did not {'end' if member.state is State.RELEASED else 'come up'} within "
                return [self._expel(member, words + formats.duration(limit - member.since))]
        return []

    def overstaying(self) -> list[Member]:
        """Return those who have yet to leave a group that others have left, half of them at most."""
        inside = [one for one in self._in_group() if one.state is State.TRAINING]
        return inside[: max(1, len(self._in_group()) // 2)] if self.changing else []

    def unexplained(self) -> list[Action]:
        """The time is over in which the cause of a start that failed might have been heard of."""
        return self._start_over() if self._unexplained else []

    def raised(self, number: int, failure: WorkerFailure, step: int | None) -> list[Action]:
        """A worker's code has raised in an evaluation: the worker stays, and all do that once more."""
        member = self.members[number]
        failure = replace(failure, rank=member.rank)
        first = self._code.before(step, evaluating=True)
        if first is not None or len(self._in_group()) == 1 or not self._pay():
            return [GiveUp(first or failure)]
        self._code.note(failure, step, retried=True, evaluating=True)
        self._reasons.append(f"rank {member.rank} {failure.cause()}")
        self.changing = True
        return self._tell(at_once=True)

    def ended(self, number: int) -> list[Action]:
        """A worker has done its part, or was released."""
        member = self.members[number]
        self._complete = self._complete or member.state is not State.RELEASED
        member.state = State.ENDED
        if self._complete and self._code.vacant and self._code.latest is not None:
            # The code of one failed where others have come to the end: nobody is left to retry that with.
            return [GiveUp(self._code.latest)]
        return self._form_when_ready() if self.changing else []

    def wants_to_leave(self, number: int) -> list[Action]:
        """A worker was given notice from outside."""
        member = self.members[number]
        if member.leaving or member.state not in (State.TRAINING, State.BROKEN):
            return []
        member.leaving = True
        self._reasons.append(f"rank {member.rank} leaves")
        actions = self._replace()
        if self._enough_without_leaving():
            actions += self._tell(at_once=False)
        return actions

    def resize(self, workers: int) -> list[Action]:
        """Change the number of workers of a run in progress; servers among them stay."""
        self.target = workers
        served = self.policy.servers(self._formed)
        staying = sorted(
            (one for one in self._in_group() if not one.leaving), key=lambda one: one.place not in served
        )
        coming = [one for one in self.members.values() if one.state in (State.STARTING, State.WAITING)]
        missing = workers - len(staying) - len(coming) - self._asked
        if missing > 0:
            return self._ask(missing)
        actions: list[Action] = []
        for member in coming[max(0, workers - len(staying)) :]:
            member.state, member.since = State.RELEASED, self._clock()
            actions.append(Release(member.number))
        for member in staying[workers:]:
            member.leaving = True
            self._reasons.append(f"rank {member.rank} leaves")
        return actions + (self._tell(at_once=False) if staying[workers:] else [])

    def stop(self) -> list[Action]:
        """End the run after the next step that all have finished, with a checkpoint; nobody joins any more."""
        self.stopping = True
        self._reasons.append("the run is interrupted")
        return [] if self.changing else self._tell(at_once=False)

    def save(self) -> list[Action]:
        """Save a checkpoint behind the next step that all have finished, and go on."""
        if self.stopping or self._saving or not self._in_group():
            return []
        self._saving = True
        self._reasons.append(SAVE_ASKED)
        return [] if self.changing else self._tell(at_once=False)

    def reshare(self, shares: Sequence[int]) -> list[Action]:
        """Deal the shards out otherwise, from the next step on; not where workers share theirs, as in tp and pp."""
        if self.changing or not len(shares) == len(self._in_group()) == self.policy.hands(len(shares)):
            return []
        self._shares = tuple(shares)
        self._reasons.append("shards are rebalanced")
        return self._tell(at_once=False)

    @property
    def errors(self) -> tuple[CodeError, ...]:
        """The errors of the user's own code, in the order they came."""
        return tuple(self._code.all)

    def group(self) -> list[Member]:
        """Return those who train together now; nobody while a change is in progress, or once some have come to the end."""
        group = self._in_group()
        whole = [one.rank for one in group] == list(range(len(group)))
        return (
            group if whole and not self.changing and all(one.state is State.TRAINING for one in group) else []
        )

    def carried(self) -> list[int]:
        """Return how many shards each of them carries, by rank."""
        size = len(self._in_group())
        return [len(self.policy.owned(rank, size, self._dealt)) for rank in range(size)]

    def restarted(self) -> None:
        """All workers are being started over."""
        self.members.clear()
        self._starts += 1
        self._retry_at, self._attempts = None, Attempts()
        self._formed = self._asked = 0
        self.changing = self._unexplained = False
        self._reasons.clear()
        self._failures.clear()
        self._code.vacant.clear()
        self._shares = self._dealt = None

    # What follows from it.

    def _in_group(self) -> list[Member]:
        group = [one for one in self.members.values() if one.state in (State.TRAINING, State.BROKEN)]
        return sorted(group, key=lambda one: (one.rank, one.number))

    def _deadline(self, member: Member) -> float | None:
        """Return by when a member is to be further than it is; whoever trains is watched by what it does instead."""
        if member.state is State.RELEASED:
            return member.since + self.policy.hang_timeout
        if member.newcomer and member.state is State.STARTING:
            return member.since + max(PATIENCE * self.policy.hang_timeout, STARTS * self._longest_start_s)
        return None

    def _expel(self, member: Member, words: str) -> Expel:
        return Expel(member.number, WorkerFailure(rank=member.rank, host="", kind="hang", message=words))

    def _dies_again(self, member: Member, failure: WorkerFailure, was: State) -> WorkerFailure | None:
        """Return what ends the run where a step has killed its worker by a signal for the second time."""
        size = self._formed
        if failure.kind != "signal" or was is not State.TRAINING or not self._trains:
            return None
        if not 0 <= member.rank < size:
            return None
        owned = self.policy.owned(member.rank, size, self._dealt)
        return self._deadly.second(failure, self.generation + self._starts, owned)

    def _futile(self, group: list[Member]) -> list[Action]:
        """Count a group that broke by itself before anybody got further: wait before the next one, and expel in the end."""
        attempts = self._attempts
        furthest = max(one.standing.operation for one in group if one.standing is not None)
        before = attempts.futile
        kept_out = any(one.standing.error for one in group if one.standing is not None)
        attempts.broke(furthest, by_itself=not self._failures and (kept_out or not self._reasons))
        if attempts.futile == before or not attempts.futile:
            return []
        why = f" ({attempts.error})" if attempts.error else ""
        if attempts.futile < LIMIT:
            self._retry_at = self._clock() + attempts.wait_s
            return [
                Say(
                    f"the group of generation {self.generation} did not come about{why}: attempt {attempts.futile} of {LIMIT}; "
                    f"the next one follows in {formats.duration(attempts.wait_s)}."
                )
            ]
        if len(group) == 1 or attempts.expelled >= self.policy.workers:
            words = f"could not form a group in {LIMIT} attempts{why}. Go on with --resume"
            return [GiveUp(WorkerFailure(rank=group[0].rank, host="", kind="few", message=words))]
        blamed = attempts.blame({one.number: one.joined for one in group})
        words = f"could not get into a group with the others in {LIMIT} attempts{why}"
        return [self._expel(self.members[blamed], words)]

    def _planned(self) -> bool:
        """Return whether the change that is due is only one of somebody joining or leaving."""
        return bool(self._reasons) and not self._failures

    def _tell(self, *, at_once: bool) -> list[Action]:
        return [
            Break(one.number, self.generation, at_once, one.leaving)
            for one in self._in_group()
            if one.state is State.TRAINING
        ]

    def _replace(self) -> list[Action]:
        """Start a worker for each that is missing, as far as the budget goes; nobody where the run is to end."""
        if self.stopping:
            return []
        here = [
            one
            for one in self.members.values()
            if one.state not in (State.RELEASED, State.ENDED) and not one.leaving
        ]
        if not any(one.state in (State.TRAINING, State.BROKEN) for one in self.members.values()):
            return []
        return self._ask(sum(self._spend() for _ in range(self.target - len(here) - self._asked)))

    def _ask(self, count: int) -> list[Action]:
        self._asked += count
        return [Start(count)] if count else []

    def _coming(self) -> int:
        """Return how many are on their way into the group, those included whose start was only asked for."""
        return self._asked + sum(
            one.state in (State.STARTING, State.WAITING) for one in self.members.values()
        )

    def _spend(self) -> bool:
        paid = self._pay()
        self.restarts += paid
        return paid

    def _pay(self) -> bool:
        """Use up one attempt of the budget; return whether there was one."""
        now = self._clock()
        self._tokens = min(self.policy.max_restarts, self._tokens + (now - self._counted) / REFILL_S)
        self._counted = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def _end_of_retries(
        self, member: Member, failure: WorkerFailure, step: int | None
    ) -> WorkerFailure | None:
        """Return what ends the run where an error of the user's code cannot be retried; else note that it is.

        It is retried once, by another worker in the same place: the layout of a run does not change because of it.
        """
        first = self._code.before(step)
        owed = 0 if member.leaving else 1 + len(self._code.vacant)
        if first is not None:
            return first
        if self._complete or not self._in_group() or self._coming() < owed:
            # What nobody is left to retry, not a loss before it that could have been outlived.
            return failures.first_cause([one for one in self._failures if one.of_code])
        self._code.note(failure, step, retried=True)
        if not member.leaving:
            self._code.vacant.append(member.place)
        return None

    def _do_without(self, member: Member, failure: WorkerFailure) -> list[Action]:
        """Continue without a lost worker where the others can; before all have met, everybody waits for everybody."""
        all_met = all(one.state is not State.STARTING for one in self.members.values())
        if failure.kind in ("input", "disk") or member.rank not in self.policy.expendable or not all_met:
            return [GiveUp(failure)]
        return [Tell(one.number, member.rank) for one in self._in_group()]

    def _cause_of(self, failure: WorkerFailure) -> WorkerFailure:
        """Return what a failure comes of: an exception can leave nothing for the others to go on from."""
        lost = failure.message.startswith(STATE_LOST)
        return self._failures[-1] if lost and self._failures and self._failures[-1].of_code else failure

    def _lost_newcomer(self, failure: WorkerFailure) -> list[Action]:
        if failure.of_code and (self._code.vacant or not self._in_group()):
            return [GiveUp(failure)]
        if failure.of_code:
            self._code.note(failure, None, retried=True)
        return self._replace() + (self._form_when_ready() if self.changing else [])

    def _failed_start(self, failure: WorkerFailure) -> list[Action]:
        if not self._trains:
            return [GiveUp(failure)]
        # One that lost its peer is heard of first at times: a bug may be behind it, which starting over would hide.
        alive = any(one.state is not State.ENDED for one in self.members.values())
        self._unexplained = alive and all(one.kind == "peer" for one in self._failures)
        return [AwaitCause()] if self._unexplained else self._start_over()

    def _start_over(self) -> list[Action]:
        failure = failures.first_cause(self._failures)
        if any(one.of_code for one in self._failures) or not self._spend():
            return [GiveUp(failure)]
        return [StartOver(failure)]

    def _enough_without_leaving(self) -> bool:
        here = [one for one in self._in_group() if not one.leaving]
        waiting = [one for one in self.members.values() if one.state is State.WAITING]
        return self.policy.trainers(len(here) + len(waiting)) >= self.policy.min_workers

    def _form_when_ready(self) -> list[Action]:
        """Form the next group when everybody who is left has come out of the old one."""
        if self._is_awaiting():
            return []
        group = self._in_group()
        if not group:
            return self._end_of_all()
        if self._unexplained:
            return []
        held_back = self._futile(group)
        return held_back if held_back or self._retry_at is not None else self._form_next(group)

    def _is_awaiting(self) -> bool:
        """Return whether somebody has yet to leave the group; there may be thousands, so who was awaited before is seen first."""
        last = self._awaited
        if last is None or last.state is not State.TRAINING or self.members.get(last.number) is not last:
            inside = (one for one in reversed(self.members.values()) if one.state is State.TRAINING)
            self._awaited = next(inside, None)
        return self._awaited is not None

    def _form_next(self, group: list[Member]) -> list[Action]:
        """Form the next group of those who have come out of the old one, and of those who join."""
        furthest = max(one.standing.operation for one in group if one.standing is not None)
        kinds = {one.standing.kind for one in group if one.standing and one.standing.operation == furthest}
        at_step = kinds == {STEP}
        staying = group if self.stopping else [one for one in group if not one.leaving]
        if not staying:
            # Somebody has to hand the state on: whoever is furthest ahead leaves one change later.
            staying = [max(group, key=lambda one: one.standing.operation if one.standing else -1)]
        step = max(one.standing.step for one in group if one.standing is not None)
        again = self._code.place(step, evaluating=not kinds <= {STEP, BODY})
        if again is not None:
            return [GiveUp(again)]
        lets_in = at_step and (not self.stopping or self._code.vacant)
        waiting = [one for one in self.members.values() if one.state is State.WAITING] if lets_in else []
        places = min(self.target, self.policy.most) - sum(not one.leaving for one in staying)
        entering = waiting[: max(0, min(places, self.policy.most - len(staying)))]
        if at_step and len(entering) < len(self._code.vacant):
            return self._await_replacement()
        there = self.policy.trainers(len(staying) + len(entering))
        if there < (self.policy.min_workers if at_step and not self.stopping else 1):
            return self._too_few(group, there)
        leaving = [one for one in group if one.leaving and one not in staying]
        if self.policy.fits(len(staying) + len(entering), self.target):
            return self._form(staying, entering, leaving)
        return self._form_in_part(staying, entering, leaving, waits=at_step and not self.stopping)

    def _form_in_part(
        self, staying: list[Member], entering: list[Member], leaving: list[Member], *, waits: bool
    ) -> list[Action]:
        """Wait for a replacement where workers share a replica and too few are left; where none comes, go on with fewer."""
        if waits and self._asked + sum(one.state is State.STARTING for one in self.members.values()):
            return []
        here = len(staying) + len(entering)
        size = self.policy.usable(here)
        complete = self.policy.complete({one.place for one in staying}, self._formed)
        ranked = sorted(staying, key=lambda one: (one.place not in complete, one.place))
        released = ranked[size:]
        words = f"{here} {'worker is' if here == 1 else 'workers are'} left, which {self.policy.choice} cannot be laid out on: "
        words += f"{size} {'goes' if size == 1 else 'go'} on as {self.policy.layout(size)}"
        words += (
            f", and {len(released)} of them {'ends' if len(released) == 1 else 'end'}." if released else "."
        )
        kept = [one for one in staying if one not in released]
        entering = entering[: size - len(kept)]
        return [Say(words), *self._form(kept, entering, [*leaving, *released])]

    def _has_place(self) -> bool:
        """Return whether somebody who waits would make the group larger."""
        here = len(self._in_group())
        waiting = sum(one.state is State.WAITING for one in self.members.values())
        return here > 0 and self.policy.usable(here + waiting) > here

    def _end_of_all(self) -> list[Action]:
        """Decide what becomes of those that were lost, now that nobody is left."""
        self.changing = False
        if self._failures and not self._complete:
            return self._start_over()
        # Where one has come to the end of the run, those that were lost after it are not missed; but a function of the
        # user's returns something on each of them.
        if not self._failures or self.policy.trains:
            return []
        first = failures.first_cause(self._failures)
        return [
            GiveUp(
                replace(first, message=f"{first.message}{_UNRETURNED}") if first.kind == "signal" else first
            )
        ]

    def _await_replacement(self) -> list[Action]:
        """Wait for whoever takes the place of a worker whose code failed; where nobody comes, that is the end."""
        cause = self._code.latest
        if cause is None or self._coming() >= len(self._code.vacant):
            return []
        return [GiveUp(cause)]

    def _too_few(self, group: list[Member], there: int) -> list[Action]:
        """Wait for those who are on their way; nobody coming is the end."""
        if self._coming():
            return []
        cause = failures.first_cause(self._failures) if self._failures else None
        words = f"; the last one lost: rank {cause.rank} {cause.cause()}" if cause is not None else ""
        return [
            GiveUp(
                WorkerFailure(
                    rank=group[0].rank,
                    host=cause.host if cause is not None else "",
                    kind="few",
                    message=f"{there} of at least {self.policy.min_workers} workers are left, and nobody is on the way "
                    f"(--max-restarts {self.policy.max_restarts}){words}. Go on with --resume",
                )
            )
        ]

    def _servers(self, members: list[Member]) -> set[int]:
        """Choose who serves: who did, so that what is held stays where it is; else newcomers on the machine that leads."""
        count, before = len(self.policy.servers(len(members))), self.policy.servers(self._formed)
        ranked = sorted(
            members,
            key=lambda one: (one.place not in before, one.host, not one.newcomer, -one.place, -one.number),
        )
        return {one.number for one in ranked[:count]}

    def _form(self, staying: list[Member], entering: list[Member], leaving: list[Member]) -> list[Action]:
        self.generation += 1
        self._attempts.formed(
            max(one.standing.operation for one in [*staying, *leaving] if one.standing is not None)
        )
        for member in entering:
            member.joined = self.generation
        for member, place in zip(entering, self._code.vacant, strict=False):
            member.place, member.newcomer = place, False
        del self._code.vacant[: len(entering)]
        serving = self._servers([*staying, *entering])
        members = sorted(
            [*staying, *entering],
            key=lambda one: (one.number in serving, one.host, one.newcomer, one.place, one.number),
        )
        self._formed = len(members) + len(self._code.vacant)
        shares = self._shares if self._shares is not None and len(self._shares) == len(members) else None
        self._dealt, self._shares = shares, None
        reason = ", ".join(dict.fromkeys(self._reasons)) or "the group broke"
        actions: list[Action] = []
        free = (place for place in count() if place not in self._code.vacant)
        for rank, member in enumerate(members):
            member.place = next(free)
            member.rank, member.state, member.newcomer, member.standing = rank, State.TRAINING, False, None
            actions.append(
                Assign(
                    member.number,
                    rank,
                    len(members),
                    self.generation,
                    reason,
                    shares,
                    stop=self.stopping,
                    save=self._saving,
                )
            )
        self._saving = False
        for member in leaving:
            member.state, member.since = State.RELEASED, self._clock()
            actions.append(Release(member.number))
        self.changing = False
        self._reasons.clear()
        self._failures.clear()
        if self.stopping:
            self._reasons.append("the run is interrupted")
        elif self._code.vacant:
            # Nobody can join in an evaluation, a checkpoint or a body: those who are left do it, and wait before their next step.
            self._reasons += [f"rank {rank} is replaced" for rank in self._code.vacant]
            actions += self._tell(at_once=False)
        elif entering and any(one.leaving for one in members):
            self._reasons += [f"rank {one.rank} leaves" for one in members if one.leaving]
            actions += self._tell(at_once=False)
        elif len(members) < self.target and self._has_place():
            self._reasons.append("a worker joins")
            actions += self._tell(at_once=False)
        elif self.policy.trainers(len(members)) < self.policy.min_workers:
            # They end what they do; before their next step they wait for others, or end.
            self._reasons.append(f"fewer than {self.policy.min_workers} workers are left")
            actions += self._tell(at_once=False)
        return actions
