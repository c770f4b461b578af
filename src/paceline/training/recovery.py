"""Survives changes of the group: the survivors keep their processes and weights, regroup, and go on.

Everything workers do together (a step, an evaluation, a checkpoint) is numbered alike on all of them, and none can be
two ahead of another, because each needs everybody. So after a break it is enough to know how many each has finished:
whoever is furthest ahead hands its state, and what the last operation came to, to the one that missed the end of it.
A worker that joins takes the state and the position, at the beginning of a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from paceline.errors import PacelineError, WorkerGoneError
from paceline.observe import Regrouped
from paceline.state.chunks import LocalState
from paceline.state.transfer import broadcast_state
from paceline.strategies.base import OpenReplica
from paceline.strategies.result import StepResult
from paceline.training.handover import WORKERS, Offer, Source, choose
from paceline.training.membership import EVALUATE, SAVE, STEP, Membership, Place, Standing
from paceline.training.position import Position
from paceline.world import World, all_gather_object, broadcast_object, connect
from paceline.world.fault_points import REGROUP, hit
from paceline.world.interruption import InterruptibleStore, Interruption
from paceline.world.peer_failure import is_lost_peer, may_come_of_a_break
from paceline.world.status_page import Kind, Phase

if TYPE_CHECKING:
    from paceline.training.run import Run

Value = TypeVar("Value")
MEETING_S = 20.0
"""How long a new group may take to form before it is given up."""
CONNECTING_S = 3.0
"""How long connecting may take once all have come; it takes milliseconds."""
ATTEMPTS = 3
"""How often a worker may take a failure for a lost peer without anybody getting further."""
NEWCOMER = -1
MISSED = "missed"
QUIET, STARTING = Phase.QUIET, Phase.STARTING
_KINDS = {EVALUATE: Kind.EVALUATE, SAVE: Kind.SAVE}


@dataclass(frozen=True)
class _Member:
    """What each tells the others when a new group has formed."""

    finished: int
    position: Position
    kind: str
    """What it was about to do, or doing."""
    cut: bool
    """Whether it holds only a part of the state."""
    redone: int
    """By how many steps it has gone back since the group broke, in attempts to form a new one."""
    dirty: bool
    """Whether the body of its loop has written to the model in a step that is to be given once more."""
    moved: bool
    """Whether the body has written to the model behind the last step that was applied."""
    outside: bool
    """Whether it is between two calls of `run.steps`, or behind the last: nothing there can be done once more."""

    @property
    def number(self) -> int:
        """Steps taken, from the beginning of the run."""
        return self.position.number


def check_intact(members: Sequence[_Member]) -> None:
    """Raise where what the furthest worker holds is the state of no step: its loop has changed it on the way."""
    before = [member for member in members if member.finished != NEWCOMER]
    furthest = max(member.finished for member in before)
    ahead = [member for member in before if member.finished == furthest]
    missed = len(ahead) < len(before)
    if any(member.dirty or (missed and member.moved) for member in ahead):
        raise RolledBackError(ahead[0].number)


class RolledBackError(WorkerGoneError):
    """The run stands at an earlier step, so what was under way is not to be done: steps are to be taken once more."""

    def __init__(self, number: int) -> None:
        super().__init__(
            f"a worker was lost, and the newest state that is whole is that of step {number}. Go on with --resume."
        )


class Recovery:
    """One worker's part in staying together."""

    def __init__(self, run: Run, membership: Membership) -> None:
        self._run, self.membership = run, membership
        self._finished = NEWCOMER if membership.newcomer else 0
        self._outcome: Any = None
        self._begun = False
        self._noticed: dict[int, int] = {}
        """How often this worker itself took a failure for a lost peer, by the operation it was at."""
        self._missed = False
        """Whether the operation under way was finished by others, and its outcome taken over from them."""
        self._broken_at: float | None = None
        self._left: OpenReplica | None = None
        """The replica of the last group that worked, as long as nobody has taken over what it holds."""
        self._held: LocalState | None = None
        """What that replica holds, asked for once: preparing another one may take it apart."""
        self._source, self._redone = "", 0
        self._dirty = self._moved = False
        """What the body of the loop had done to the model where the group broke."""
        self._back = False
        """Whether the state of the new group is one of before: what this worker's loop did since then is not in it."""
        self.recoveries: list[dict[str, Any]] = []
        self.stopping = False
        """Whether the group has formed only to save a checkpoint and to end."""

    @property
    def generation(self) -> int:
        """The group this worker is in."""
        return int(self._run.world.generation)

    @property
    def waiting_to_join(self) -> bool:
        """Whether this worker was started to join a run, and has not yet."""
        return self._finished == NEWCOMER

    def survives(self, error: Exception) -> bool:
        """Return whether a failure is a broken group, and not the user's code."""
        if not (self._begun and self.membership.elastic):
            return False
        if self._run.world.interruption.raised:
            return may_come_of_a_break(error)
        if not is_lost_peer(error):
            return False
        # Words can deceive: the user's own code may fail to connect somewhere, and would do so for ever.
        self._noticed[self._finished] = self._noticed.get(self._finished, 0) + 1
        return self._noticed[self._finished] <= ATTEMPTS

    def check_present(self, number: int) -> None:
        """Raise where another worker has left the loop, and will never take part in this step."""
        self._run.check_present(number)

    def begin(self) -> None:
        """Enter training; a newcomer waits here until it is let in."""
        self._begun = True
        self.membership.attach(self._run.world.generation, self._run.world.interruption)
        self.membership.begin()
        if self.waiting_to_join:
            self.regroup(STEP)

    def together(self, kind: str, action: Callable[[], Value], *, called: str | None = None) -> Value:
        """Do something with all workers; where one is lost on the way, do it again with those that are left.

        `called` is the name under which the user's loop has asked for it: one that some workers alone call is refused.
        """
        if self.waiting_to_join:
            return action()  # alone: it is nothing that the others do too
        pulse = self._run.world.pulse
        while True:
            pulse.begin(_KINDS[kind], self._run.position.number)
            self._run.world.interruption.discards = (
                None  # what is measured inside a step is not discarded with it
            )
            try:
                self._run.check_left()
                if called is not None:
                    self._run.check_met(called)
                value = action()
            except Exception as error:
                if not (self.survives(error) or self._tries_again(kind, error)):
                    raise
                missed, outcome = self.regroup(kind)
                if self._back:
                    # Steps are to be taken once more, and whoever asked for this must not go on as if they had been.
                    raise RolledBackError(self._run.position.number) from error
                if not missed:
                    continue
                self._end_operation()
                return outcome  # type: ignore[no-any-return]
            self.finish(value)
            self._end_operation()
            return value

    def _end_operation(self) -> None:
        """Show that it is over; outside of the steps the function may take as long as it likes until the next."""
        self._run.world.pulse.end()
        if not self._run.takes_steps:
            self._run.world.pulse.enter(QUIET)

    def _tries_again(self, kind: str, error: Exception) -> bool:
        """Return whether all are to repeat an evaluation in which the user's code raised: it has changed no state.

        Whoever decides over the group knows of it, and ends the run where it is raised a second time.
        """
        if not (self._begun and self.membership.elastic and kind == EVALUATE) or isinstance(
            error, PacelineError
        ):
            return False
        self.membership.report_error(error, self._run.position.number)
        return True

    def finish(self, outcome: Any) -> None:
        """Count an operation that is done, and keep what it came to for one that may have missed it."""
        self._finished += 1
        self._outcome = outcome.state() if isinstance(outcome, StepResult) else outcome

    def start_over(self) -> None:
        """Leave the run as it is: no state that is whole lacks nothing and holds nothing twice."""
        raise RolledBackError(self._run.position.number)

    def settle(self) -> None:
        """Close the books of a recovery, if there was one, when a step has been finished after it."""
        if self._broken_at is not None:
            self.recoveries[-1]["seconds"] = round(time.monotonic() - self._broken_at, 4)
            self._broken_at = None

    def regroup(self, kind: str) -> tuple[bool, Any]:
        """Leave the broken group and enter the next; says whether others had finished what was under way, and its outcome."""
        run = self._run
        self._source, self._redone, self._back = "", 0, False
        if not self.waiting_to_join:
            self._broken_at = self._broken_at or time.monotonic()
            run.leave_group()
        self._dirty, self._moved = run.break_off(in_step=kind == STEP)
        self._left, self._held = run.replica_or_none, None
        if self._left is not None and not self._left.whole and self.membership.leaving:
            run.cut.bequeath(self._position(kind), self._left.held())
        while True:
            # What comes after an operation that others finished is not known here: nobody may join then.
            standing = Standing(
                operation=self._finished, kind=MISSED if self._missed else kind, step=run.position.number
            )
            # Whoever waits for a place may wait for a worker that is only being started: that is no hang.
            run.world.pulse.enter(QUIET)
            place = self.membership.next_place(None if self.waiting_to_join else standing)
            started = time.monotonic()
            run.world.pulse.enter(STARTING)
            try:
                run.world = run.laid_out(self._connect(place))
                replica = self._agree(run.world, kind)
                run.enter_group(self._position(kind), replica)
            except Exception as error:
                broken = is_lost_peer(error) or run.world.interruption.raised
                run.leave_group()
                # Going back is decided, also where the others' end has broken this group by now: what this worker holds is
                # another step's than the one it stands at.
                if isinstance(error, RolledBackError) or not broken:
                    raise
                continue
            self.stopping = place.stop
            if not place.stop:
                self._note(place, self._position(kind), started)
            missed, self._missed = self._missed, False
            return missed, self._outcome

    def _connect(self, place: Place) -> World:
        """Form the next group; a loss in the middle of it ends the attempt."""
        run, options = self._run, self._run.options
        hit(REGROUP)
        interruption = Interruption()
        self.membership.attach(place.generation, interruption)
        # From here on a break concerns the group that is being formed.
        run.world = replace(run.world, interruption=interruption)
        identity = place.identity
        store = None
        if identity.size > 1:
            store = InterruptibleStore(
                TCPStore(
                    identity.master_address,
                    identity.master_port,
                    is_master=False,
                    timeout=timedelta(seconds=MEETING_S),
                ),
                interruption,
                MEETING_S,
            )
        return connect(
            identity,
            store=store,
            backend=options.backend,
            checked=options.check_collectives,
            generation=place.generation,
            shares=place.shares,
            meeting_s=CONNECTING_S,
            interruption=interruption,
            on=run.world.device,
            pulse=run.world.pulse,
        )

    def _agree(self, world: World, kind: str) -> OpenReplica:
        """Bring everybody to where the furthest ahead stands, and give the replica of the new group."""
        run = self._run
        position = self._position(kind)
        cut = self._left is not None and not self._left.whole
        outside = not (run.takes_steps or run.repeatable) and not self.waiting_to_join
        mine = _Member(self._finished, position, kind, cut, self._redone, self._dirty, self._moved, outside)
        members: list[_Member] = all_gather_object(world.comm, mine)
        if run.cut.expected(world) or any(member.cut for member in members):
            return self._put_together(world, members)
        check_intact(members)
        self._catch_up(world, members)
        return run.prepare_group(self._left)

    def _catch_up(self, world: World, members: Sequence[_Member]) -> None:
        """Have whoever is furthest ahead hand its state to those behind it, where each holds all of it."""
        run = self._run
        source = max(range(len(members)), key=lambda rank: (members[rank].finished, -rank))
        ahead, mine = members[source], members[world.rank]
        if all(member.finished == ahead.finished for member in members):
            return
        hit(REGROUP)
        sent: Any = None
        if world.rank == source:
            behind = any(member.number != ahead.number for member in members)
            sent = {
                "state": run.replica.state()
                if behind or NEWCOMER in {one.finished for one in members}
                else None,
                "options": run.options_then,
                "outcome": self._outcome,
                "run": run.shared_state(),
                "recoveries": self.recoveries,
            }
        got = broadcast_state(world, sent, source)
        if mine.finished == ahead.finished:
            return
        if mine.finished not in (ahead.finished - 1, NEWCOMER):
            raise RuntimeError(f"this worker is {ahead.finished - mine.finished} operations behind")
        # From here to the end nothing can fail half-way: whoever has the state counts as having done the work.
        if mine.finished == NEWCOMER or mine.number != ahead.number:
            run.replica.load(got["state"])
        if mine.finished != NEWCOMER and mine.number != ahead.number:
            run.be_behind_step(got["options"])
        self._outcome, self._finished = got["outcome"], ahead.finished
        if mine.finished == NEWCOMER:
            run.adopt(ahead.position, got["run"])
            self.recoveries = got["recoveries"]
        else:
            self._missed = True

    def _put_together(self, world: World, members: Sequence[_Member]) -> OpenReplica:
        """Prepare for the new group and bring the parts of the state together, from wherever all of them are."""
        run, mine = self._run, members[world.rank]
        run.await_saves()
        if self._held is None and self._left is not None and mine.finished != NEWCOMER:
            self._held = self._left.held()
        held = self._held
        offers: list[Offer] = all_gather_object(world.comm, run.cut.offer(mine.finished, mine.position, held))
        source = choose(offers)
        if source.kind == WORKERS:
            check_intact(members)
        ahead = max(range(len(members)), key=lambda rank: (members[rank].finished, -rank))
        sent = {
            "outcome": self._outcome,
            "options": run.options_then,
            "run": run.shared_state(),
            "recoveries": self.recoveries,
        }
        got = broadcast_object(world.comm, sent if world.rank == ahead else None, ahead)
        hit(REGROUP)
        replica = run.prepare_group(self._left)
        try:
            position = run.fill(replica, source, held)
        except BaseException:
            replica.abandon()
            raise
        # From here on this worker holds what it needs, whoever else is lost: nothing may fail before that is noted.
        self._left, self._held = replica, None
        if mine.finished == NEWCOMER:
            run.adopt(position, got["run"])
            self.recoveries = got["recoveries"]
        self._stand(source, position, mine, members, got["outcome"])
        run.adopt_replica(replica)
        if self._missed and source.kind == WORKERS:
            run.be_behind_step(got["options"])
        run.cut.clear_up(world)
        return replica

    def _stand(
        self, source: Source, position: Position, mine: _Member, members: Sequence[_Member], outcome: Any
    ) -> None:
        """Note where this worker stands with a state that was put together."""
        before = [member for member in members if member.finished != NEWCOMER]
        furthest = max(member.number + member.redone for member in before)
        finished = max(member.finished for member in before)
        self._source, self._redone = source.kind, furthest - position.number
        if source.kind != WORKERS and any(member.outside for member in before):
            raise RolledBackError(position.number)
        # With no step to take again it may be the end of an epoch that is to be done again: another function of the user's.
        if self._redone or (source.kind != WORKERS and any(one.position != position for one in before)):
            self._run.go_back(position)
            self._back = True
            self._missed, self._finished = False, finished + 1
        else:
            # It stays so when the group breaks again before this worker could count what it missed.
            self._missed |= NEWCOMER != mine.finished < finished
            self._outcome, self._finished = outcome, finished

    def _position(self, kind: str) -> Position:
        """Return where this worker stands, a step included that others finished and it has yet to count."""
        position = self._run.position
        return position.after_step() if self._missed and kind == STEP else position

    def _note(self, place: Place, position: Position, started: float) -> None:
        run = self._run
        self.recoveries.append(
            {
                "generation": place.generation,
                "workers": run.world.size,
                "step": position.number,
                "reason": place.reason,
                **({"source": self._source, "redone": self._redone} if self._source else {}),
                "seconds": round(time.monotonic() - (self._broken_at or started), 4),
            }
        )
        run.emit(
            Regrouped(
                generation=place.generation,
                workers=run.world.size,
                step=position.number,
                reason=place.reason,
                seconds=self.recoveries[-1]["seconds"],
                source=self._source,
                redone=self._redone,
                transport=run.transport,
            )
        )
