"""Survives changes of the group: the survivors keep their processes and weights, regroup, and go on.

Everything workers do together (a step, an evaluation, a checkpoint) is numbered alike on all of them, and none can be
two ahead of another, because each needs everybody. So after a break it is enough to know how many each has finished.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from paceline.errors import PacelineError
from paceline.recovery.agreement import NEWCOMER, OpenBody, RolledBackError, WentBackError
from paceline.recovery.group_state import GroupState
from paceline.recovery.hooks import RunHooks
from paceline.recovery.loop_exits import LoopExits
from paceline.recovery.membership import EVALUATE, SAVE, STEP, Membership
from paceline.recovery.options import RecoveryOptions
from paceline.recovery.regrouping import Regrouping
from paceline.recovery.same_call import check_same_call
from paceline.recovery.sharded_recovery import Numbers, ShardedRecovery
from paceline.world.peer_failure import is_lost_peer, may_come_of_a_break
from paceline.world.status_page import OperationKind, Phase

Value = TypeVar("Value")
ATTEMPTS = 3
"""How often a worker may take a failure for a lost peer without anybody getting further."""
_KINDS = {EVALUATE: OperationKind.EVALUATE, SAVE: OperationKind.SAVE}


class Recovery:
    """One worker's part in staying together."""

    hooks: RunHooks
    """What a change of the group asks of the run; set by the run before its training begins."""

    def __init__(
        self, group: GroupState, membership: Membership, sharded: ShardedRecovery, options: RecoveryOptions
    ) -> None:
        self.membership = membership
        self.group, self.sharded, self._options = group, sharded, options
        group.finished = NEWCOMER if membership.newcomer else 0
        self.exits = LoopExits()
        """Where each worker left the calls of `run.steps`."""
        self._begun = False
        self._noticed: dict[int, int] = {}
        """How often this worker itself took a failure for a lost peer, by the operation it was at."""
        self._went_back = False

    @property
    def elastic(self) -> bool:
        """Whether losing a worker is survived."""
        return self.membership.elastic is not None

    def survives(self, error: Exception) -> bool:
        """Return whether a failure is a broken group, and not the user's code."""
        if not (self._begun and self.elastic):
            return False
        if self.group.world.interruption.raised:
            return may_come_of_a_break(error)
        if not is_lost_peer(error):
            return False
        # Words can deceive: the user's own code may fail to connect somewhere, and would do so for ever.
        finished = self.group.finished
        self._noticed[finished] = self._noticed.get(finished, 0) + 1
        return self._noticed[finished] <= ATTEMPTS

    def check_present(self, number: int) -> None:
        """Raise where another worker has left the loop, and will never take part in this step."""
        self.exits.check_present(self.group.world, self.group.position.phase, number)

    def check_loop(self, rank: int) -> None:
        """Raise where one that is waited for has left the loop of `run.steps` that this worker is in."""
        position = self.group.position
        self.exits.check_present(self.group.world, position.phase, position.number, (rank,))

    def begin(self) -> None:
        """Enter training; a newcomer waits here until it is let in."""
        self._begun = True
        if self.membership.elastic is not None:
            world = self.group.world
            self.membership.elastic.attach(world.generation, world.interruption)
        self.membership.begin()
        if self.group.waits_to_join:
            self.regroup(STEP)

    def together(self, kind: str, action: Callable[[], Value], *, called: str | None = None) -> Value:
        """Do something with all workers; where one is lost on the way, do it again with those that are left.

        `called` is the name under which the user's loop has asked for it: one that some workers alone call is refused.
        """
        group = self.group
        if group.waits_to_join:
            return action()  # alone: it is nothing that the others do too
        status_page = group.world.status_page
        group.asks_in_body |= called is not None and group.open_call is not None
        while True:
            status_page.begin(_KINDS[kind], group.position.number)
            # What is measured inside a step is not discarded with it.
            group.world.interruption.discards = None
            try:
                self.exits.check(group.world)
                if called is not None:
                    check_same_call(group.world, called)
                value = action()
            except Exception as error:
                if not (self.survives(error) or self._tries_again(kind, error)):
                    raise
                missed, outcome = self.regroup(kind)
                if self._went_back:
                    # Steps are to be taken once more, and whoever asked for this must not go on as if they had been.
                    raise WentBackError(group.position.number) from error
                if not missed:
                    continue
                self._end_operation()
                return outcome  # type: ignore[no-any-return]
            self.finish(value)
            self._end_operation()
            return value

    def _end_operation(self) -> None:
        """Show that it is over; outside of the steps the function may take as long as it likes until the next."""
        self.group.world.status_page.end()
        if self.group.open_call is None:
            self.group.world.status_page.enter(Phase.QUIET)

    def _tries_again(self, kind: str, error: Exception) -> bool:
        """Return whether all are to repeat an evaluation in which the user's code raised: it has changed no state.

        Whoever decides over the group knows of it, and ends the run where it is raised a second time.
        """
        elastic = self.membership.elastic
        if elastic is None or not self._begun or kind != EVALUATE or isinstance(error, PacelineError):
            return False
        elastic.report_error(error, self.group.position.number)
        return True

    def finish(self, outcome: Any) -> None:
        """Count an operation that is done, and keep what it came to for one that may have missed it."""
        self.group.finished += 1
        self.group.outcome = outcome

    def start_over(self) -> None:
        """Raise where every whole state lacks something that the loop did, or has it twice: all start over from a checkpoint."""
        raise RolledBackError(self.group.position.number)

    def note_step(self, numbers: Callable[[], Numbers]) -> None:
        """Note that a step has been finished, and the whole time of a change of the group, if there was one before it."""
        group = self.group
        if self._options.staleness:
            self.sharded.note_step(group.position, numbers)
        if group.broken_at is not None:
            if group.recoveries:  # else the run ends with the step that broke
                group.recoveries[-1]["seconds"] = round(time.monotonic() - group.broken_at, 4)
            group.broken_at = None

    def end_body(self, body: OpenBody) -> None:
        """Know that this worker has gone through a body to no effect; others may be in another attempt, or the next step's."""
        if self.group.broken_body == body:
            self.group.broken_body = None

    def regroup(self, kind: str) -> tuple[bool, Any]:
        """Leave the broken group and enter the next; return whether others had finished what was in flight, and its outcome.

        In the body of a user's own loop that evaluates or saves at times nobody joins before all have come to its end:
        whoever joins begins with a step.
        """
        if self.membership.elastic is None:
            raise RuntimeError("a fixed world has no next group")
        self._went_back = False
        change = Regrouping(
            kind=kind,
            group=self.group,
            hooks=self.hooks,
            sharded=self.sharded,
            options=self._options,
            membership=self.membership.elastic,
        )
        missed = change.enter_next()
        self._went_back = change.went_back
        return missed, self.group.outcome
