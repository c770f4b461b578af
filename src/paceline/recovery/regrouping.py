"""One change of the group: the survivors leave the broken one, form the next, and agree on the state they go on from.

It is enough to know how many operations each has finished: whoever is furthest ahead hands its state, and what the last
operation came to, to the one that missed the end of it. A worker that joins takes the state and the position, at the
beginning of a step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from paceline.observe import Regrouped
from paceline.recovery.agreement import (
    NEWCOMER,
    MemberReport,
    OpenBody,
    RolledBackError,
    broken_body,
    check_computed,
    check_intact,
    check_kernels,
    furthest,
)
from paceline.recovery.group_state import GroupState
from paceline.recovery.handover import WORKERS, StateInventory, StateSource, choose
from paceline.recovery.hooks import RunHooks
from paceline.recovery.membership import BODY, SAVE_ASKED, STEP, ElasticMembership, Place, Standing
from paceline.recovery.options import RecoveryOptions
from paceline.recovery.position import Position
from paceline.recovery.sharded_recovery import ShardedRecovery
from paceline.state.chunks import LocalState
from paceline.state.transfer import broadcast_state
from paceline.strategies.replica import Replica
from paceline.strategies.result import StepResult
from paceline.world import World, all_gather_object, broadcast_object, connect, env
from paceline.world.fault_points import REGROUP, hit
from paceline.world.interruption import Interruption
from paceline.world.join import meet
from paceline.world.peer_failure import is_lost_peer
from paceline.world.peer_failure_messages import text_of
from paceline.world.status_page import Phase

RENDEZVOUS_S = 20.0
"""How long a new group may take to form before it is given up."""
CONNECTING_S = 3.0
"""How long connecting may take once all have come; it takes milliseconds."""
MISSED = "missed"
_LONGEST_WORDS = 200


@dataclass(kw_only=True)
class Regrouping:
    """One worker's way from a group that broke, or is to be left, to the next one that works."""

    kind: str
    """What was in flight."""
    group: GroupState
    hooks: RunHooks
    sharded: ShardedRecovery
    options: RecoveryOptions
    membership: ElasticMembership
    went_back: bool = False
    """Whether the state of the new group is one of before: what this worker's loop did since then is not in it."""
    redone: int = 0
    _source: str = ""
    _before: Replica | None = None
    """The replica of the last group that worked, as long as nobody has taken over what it holds."""
    _held: LocalState | None = None
    """What that replica holds, asked for once: preparing another one may take it apart."""
    _dirty: bool = False
    _body: OpenBody | None = None
    """The attempt at a step in whose body the loop was where the group broke."""
    _moved: bool = False
    """Whether the body of the loop had written to the model: in the step that broke, and behind the last one that was applied."""
    _error: str = ""
    """What kept this worker out of the last group that was tried; nothing where another one's trouble did."""

    def enter_next(self) -> bool:
        """Leave the broken group and enter the next; return whether others had finished what was in flight."""
        group = self.group
        if not group.waits_to_join:
            group.broken_at = group.broken_at or time.monotonic()
            self.hooks.leave_group()
        self._body = self.hooks.open_body
        self._dirty, self._moved = self.hooks.break_off(in_step=self.kind == STEP)
        self._before = group.replica_or_none
        if self._before is not None and not self._before.whole and self.membership.leaving:
            self.sharded.leave_behind(self._position(), self._before.local_state())
        while True:
            standing = Standing(
                operation=group.finished,
                kind=self._standing_kind(),
                step=group.position.number,
                error=self._error,
            )
            # Whoever waits for a place may wait for a worker that is only being started: that is no hang.
            group.world.status_page.enter(Phase.QUIET)
            place = self.membership.next_place(None if group.waits_to_join else standing)
            started = time.monotonic()
            group.world.status_page.enter(Phase.STARTING)
            connected = False
            try:
                group.world = self.options.laid_out(self._connect(place))
                connected = True
                replica = self._agree(group.world)
                self.hooks.enter_group(self._position(), replica)
            except Exception as error:
                told = group.world.interruption.raised
                # Whatever fails before all have met is the network's or a peer's: nothing of the user's has run yet.
                unmet = not connected and isinstance(error, RuntimeError | OSError)
                broken = told or unmet or is_lost_peer(error)
                self._error = "" if told else _in_a_line(error)
                self.hooks.leave_group()
                # Going back is decided, also where the others' end has broken this group by now: what this worker holds is
                # another step's than the one it stands at.
                if isinstance(error, RolledBackError) or not broken:
                    raise
                continue
            group.stopping, group.save_asked = place.stop, place.save
            if place.reason == SAVE_ASKED:
                group.broken_at = None  # nobody was lost, and nothing to be made up for
            elif not place.stop:
                self._note(place, started)
            missed, group.missed = group.missed, False
            return missed

    def _standing_kind(self) -> str:
        """Return what this worker does next; others can join only where all begin a step."""
        if self.group.missed:
            return MISSED  # what comes after an operation that others finished is not known here
        in_body = self._body is not None and self.group.asks_in_body
        return BODY if self.kind == STEP and in_body else self.kind

    def _connect(self, place: Place) -> World:
        """Form the next group; a loss in the middle of it ends the attempt."""
        group, options, identity = self.group, self.options, place.identity
        env.export(identity.variables())  # for user code that reads RANK: a newcomer knows its rank only now
        interruption = Interruption()
        self.membership.attach(place.generation, interruption)
        # From here on a break concerns the group that is being formed.
        group.world = replace(group.world, interruption=interruption)
        hit(REGROUP)
        return connect(
            identity,
            store=meet(identity, timedelta(seconds=RENDEZVOUS_S)) if identity.size > 1 else None,
            backend=options.backend,
            checked=options.check_collectives,
            generation=place.generation,
            shares=place.shares,
            meeting_s=CONNECTING_S,
            interruption=interruption,
            on=group.world.device,
            status_page=group.world.status_page,
        )

    def _agree(self, world: World) -> Replica:
        """Bring everybody to where the furthest ahead stands, and return the replica of the new group."""
        group = self.group
        inside = group.open_call is not None or group.repeatable or group.waits_to_join
        mine = MemberReport(
            finished=group.finished,
            position=self._position(),
            body=self._body,
            asks_in_body=group.asks_in_body,
            sharded=self._before is not None and not self._before.whole,
            redone=self.redone,
            dirty=self._dirty,
            moved=self._moved,
            outside=not inside,
            serves=self._before is not None and not self._before.placement.computes,
            registers=self.hooks.registers_states,
            kernels=self.hooks.kernels,
        )
        members: list[MemberReport] = all_gather_object(world.comm, mine)
        check_kernels(members, world.rank)
        check_computed(members)
        group.asks_in_body = any(member.asks_in_body for member in members)
        group.broken_body = broken_body(members)
        if self.options.shards_state(world) or any(member.sharded for member in members):
            return self._assemble(world, members)
        check_intact(members)
        self._catch_up(world, members)
        return self.hooks.prepare_group(self._before)

    def _catch_up(self, world: World, members: Sequence[MemberReport]) -> None:
        """Have whoever is furthest ahead hand its state to those behind it, where each holds all of it."""
        group, source = self.group, furthest(members)
        ahead, mine = members[source], members[world.rank]
        if all(member.finished == ahead.finished for member in members):
            return
        hit(REGROUP)
        sent: Any = None
        if world.rank == source:
            behind = any(member.number != ahead.number or member.finished == NEWCOMER for member in members)
            sent = {"state": group.replica.state() if behind else None, **self._handed_on()}
        got = broadcast_state(world, sent, source)
        if mine.finished == ahead.finished:
            return
        if mine.finished not in (ahead.finished - 1, NEWCOMER):
            raise RuntimeError(f"this worker is {ahead.finished - mine.finished} operations behind")
        # From here to the end nothing can fail half-way: whoever has the state counts as having done the work.
        joins = mine.finished == NEWCOMER
        if joins or mine.number != ahead.number:
            group.replica.load(got["state"])
        if not joins and mine.number != ahead.number:
            self.hooks.finish_step(got["run"])
        group.outcome, group.finished = got["outcome"], ahead.finished
        if joins:
            self._adopt(ahead.position, got)
        else:
            group.missed = True

    def _assemble(self, world: World, members: Sequence[MemberReport]) -> Replica:
        """Prepare for the new group and bring the parts of the state together, from wherever all of them are."""
        group, mine = self.group, members[world.rank]
        checkpoint = self.hooks.newest_checkpoint()
        if self._held is None and self._before is not None and mine.finished != NEWCOMER:
            self._held = self._before.local_state()
        held = self._held
        own = self.sharded.inventory(mine.finished, mine.position, held, checkpoint)
        inventories: list[StateInventory] = all_gather_object(world.comm, own)
        source = choose(inventories)
        if source.kind == WORKERS:
            check_intact(members)
        ahead = furthest(members)
        sent = self._handed_on()
        got = broadcast_object(world.comm, sent if world.rank == ahead else None, ahead)
        hit(REGROUP)
        replica = self.hooks.prepare_group(self._before)
        try:
            position = self.hooks.restore(replica, source, held)
        except BaseException:
            replica.abandon()
            raise
        # From here on this worker holds what it needs, whoever else is lost: nothing may fail before that is noted.
        self._before, self._held = replica, None
        if mine.finished == NEWCOMER:
            self._adopt(position, got)
        self._stand(source, position, mine, members, got["outcome"])
        group.replica_or_none = replica
        group.parameters = self.sharded.survey(replica, world)
        if group.missed and source.kind == WORKERS:
            self.hooks.finish_step(got["run"])
        self.sharded.remove_departing(world)
        return replica

    def _handed_on(self) -> dict[str, Any]:
        """Return what the furthest ahead tells the others beside the state of its replica."""
        group, shared = self.group, self.hooks.shared_state()
        return {
            "outcome": group.outcome.state() if isinstance(group.outcome, StepResult) else group.outcome,
            "run": shared,
            "numbers": self.sharded.numbers,
            "recoveries": group.recoveries,
        }

    def _adopt(self, position: Position, got: dict[str, Any]) -> None:
        """Join the others where they stand, or go back to, with what the furthest ahead has told."""
        self.hooks.adopt(position, got["run"])
        self.sharded.adopt_numbers(got["numbers"])
        self.group.recoveries = got["recoveries"]

    def _stand(
        self,
        source: StateSource,
        position: Position,
        mine: MemberReport,
        members: Sequence[MemberReport],
        outcome: Any,
    ) -> None:
        """Note where this worker stands with a state that was put together."""
        group = self.group
        before = [member for member in members if member.finished != NEWCOMER]
        number = max(member.number + member.redone for member in before)
        finished = max(member.finished for member in before)
        self._source, self.redone = source.kind, number - position.number
        if source.kind != WORKERS and any(member.outside for member in before):
            raise RolledBackError(position.number)
        # Also with no step to take again, `after_epoch` may have to run once more.
        if self.redone or (source.kind != WORKERS and any(one.position != position for one in before)):
            self.hooks.go_back(position)
            self.went_back = True
            group.missed, group.finished = False, finished + 1
        else:
            if source.kind != WORKERS and any(member.dirty for member in before):
                self.hooks.put_states_back()
            # It stays so when the group breaks again before this worker could count what it missed.
            group.missed |= NEWCOMER != mine.finished < finished
            group.outcome, group.finished = outcome, finished

    def _position(self) -> Position:
        """Return where this worker stands, a step included that others finished and it has yet to count."""
        position = self.group.position
        return position.after_step() if self.group.missed and self.kind == STEP else position

    def _note(self, place: Place, started: float) -> None:
        group = self.group
        change: dict[str, Any] = {
            "generation": place.generation,
            "workers": group.world.size,
            "step": self._position().number,
            "reason": place.reason,
        }
        seconds = round(time.monotonic() - (group.broken_at or started), 4)
        moved: dict[str, Any] = {
            "source": self._source,
            "redone": self.redone,
            "moved_bytes": self.sharded.moved_bytes,
        }
        group.recoveries.append({**change, **(moved if self._source else {}), "seconds": seconds})
        group.emit(Regrouped(**change, **moved, seconds=seconds, transport=group.transport))


def _in_a_line(error: BaseException) -> str:
    """Return the words of an error, for a line of the launcher's."""
    return next(iter(text_of(error).splitlines()), "")[:_LONGEST_WORDS] or type(error).__name__
