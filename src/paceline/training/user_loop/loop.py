"""What is known of the user's loop: what it must not do, what it draws on, what it has registered, what its body changes."""

from __future__ import annotations

from paceline.training.checks.hidden_state import HiddenState
from paceline.training.checks.left_by_evaluation import LeftByEvaluation
from paceline.training.state import RunState
from paceline.training.user_loop.attempt import LoopBody, StepAttempt
from paceline.training.user_loop.loop_guard import LoopGuard
from paceline.training.user_loop.loop_state import LoopState
from paceline.training.user_loop.schedules import LoopSchedule


class Loop:
    """Those who watch the loop, and what it keeps."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self.guard = LoopGuard(state.seed_update)
        """Finds what a loop does that is done for it."""
        self.hidden = HiddenState()
        self.left = LeftByEvaluation(self.hidden.told)
        self.registered = LoopState()
        """What the loop has registered beside model, optimizer and schedule."""
        self.schedule: LoopSchedule | None = None
        """The schedule that the loop steps itself, where `run.prepare` knows of it."""
        self.body = LoopBody(state, self.registered)
        """What the body of the user's loop does to the state."""

    def begin_attempt(self, *, elastic: bool) -> StepAttempt | None:
        """Note what a step begins with, should it be given once more."""
        self.body.attempt = None
        if self._state.world.size == 1 or not elastic:
            return None
        return self.body.begin()

    def leave_group(self) -> None:
        """See what the body has done by now, before the step in flight is given up."""
        self.guard.leave_group()
        attempt = self.body.attempt
        if attempt is not None and self._state.replica_or_none is not None:
            attempt.leave_group()

    def break_off(self, *, in_step: bool) -> tuple[bool, bool]:
        """Put back what a body did in a step that broke; return whether it wrote to the model in it, and after the last."""
        attempt, prepared = self.body.attempt, self._state.replica_or_none is not None
        if not prepared or attempt is None or not in_step:
            return False, prepared and self.body.moved
        attempt.put_back()
        return attempt.dirty, self.body.moved
