"""One call of `run.steps` after another: which of them are over, where a resumed run goes on, how a loop is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.compat.optim import mark_stepped
from paceline.data import Order
from paceline.errors import InputError
from paceline.observe import Note
from paceline.recovery.agreement import RolledBackError
from paceline.recovery.membership import SAVE
from paceline.state.optimizer_state import saved_options_of, set_options
from paceline.strategies.in_turns.optimizers import each_of
from paceline.training.checks.before_first_step import (
    check_batch_size,
    check_clip,
    check_last_batch,
    read_ends,
)
from paceline.training.core import EngineCore
from paceline.training.description import announcement, new_receipt
from paceline.training.group import RunGroup
from paceline.training.preparation import Preparation
from paceline.training.saving import Saving
from paceline.training.step import Step
from paceline.training.stepping import Stepping, StepsCall
from paceline.training.turns import check_repeats, check_turns, read_turns
from paceline.training.user_loop.call_history import LEFT
from paceline.training.user_loop.kept_state import KeptState
from paceline.training.user_loop.replay import LoopReplay
from paceline.world import all_gather_object
from paceline.world.status_page import Phase

_DECIDE = (
    "it was asked for fewer calls, or decides by something that is not as it was then. Decide by run.evaluate, a step's result, "
    "or what run.register holds."
)


@dataclass(kw_only=True)
class Calls:
    """The calls of `run.steps` on one worker."""

    core: EngineCore
    replay: LoopReplay
    preparation: Preparation
    saving: Saving
    group: RunGroup

    def steps(
        self,
        data: Any,
        *,
        batch_size: int | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        max_grad_norm: float | None = None,
        after_epoch: Callable[[int], None] | None = None,
        order: Order | None = None,
        stops: Callable[[], bool] | None = None,
        turns: Sequence[str] = (),
        fresh_batches: bool = False,
    ) -> Iterator[Step]:
        """Yield one `Step` for each optimizer step, from where the run stands to the end of this call."""
        state, history = self.core.state, self.core.history
        self.replay.take_back()
        self.core.loop.guard.take_past_back()  # an iterator of the call before may be kept
        epochs, steps = read_ends(epochs, steps)
        check_clip(max_grad_norm)
        round_ = read_turns(turns, state.replica.optimizer, fresh=fresh_batches)
        phase = history.next_call()
        self.core.changed.begin(state.replica.model, state.task)
        if phase < state.position.phase and not state.waits_to_join:
            self._skip(phase)
            self.replay.hand_over()
            return
        loader = self.core.loaders.opened(data, batch_size=batch_size, order=order)
        check_repeats(loader, round_)
        loader.repeats = round_.repeats
        call = StepsCall(
            phase=phase,
            loader=loader,
            epochs=epochs,
            steps=steps,
            max_grad_norm=max_grad_norm,
            after_epoch=after_epoch,
            stops=stops,
            turns=round_,
        )
        try:
            stepping = self._begin(call)
            while stepping is not None and not state.ended:
                yield from stepping.take()
                self._note_left(phase, ended=True)
                self.core.journal.read_pending()
                self.saving.at_the_end()
                # A worker may have been lost in that very checkpoint, and steps with it.
                state.ended = not stepping.left
            if stepping is not None:
                self.core.records.finish()
        except GeneratorExit:
            self._note_left(phase)
            raise
        finally:
            # What the function does behind its steps may take as long as it likes.
            state.world.status_page.enter(Phase.QUIET)
            history.went_back = False
            if phase == history.call:
                self.core.loop.guard.apply = None
                self.core.loop.guard.take_past_back()
            if state.open_call == phase:  # an iterator may be closed long after the next call began
                state.open_call = None
                then = {
                    "early": not state.ended,
                    "states": self.core.loop.registered.small(),
                    "options": saved_options_of(state.replica.optimizer),
                }
                history.behind.note(phase, LEFT, then)
            if phase == history.call:
                state.seed_loop("call", phase + 1)
            if loader is not data:
                self.core.loaders.close(loader)
            self.replay.hand_over()

    def _begin(self, call: StepsCall) -> Stepping | None:
        """Go to where this call begins, or goes on; return its steps, None where they were all taken before."""
        state, history, phase = self.core.state, self.core.history, call.phase
        self._check_before(call)
        state.training = call.loader, call.max_grad_norm
        history.catches_up |= state.waits_to_join
        joined = history.catches_up
        behind = self._find_place(call)
        self.preparation.freeze()
        self.core.loop.registered.begin()
        self.core.recovery.begin()
        if phase < state.position.phase:
            history.kept = history.kept or KeptState(state.replica, self.core.loop.registered)
            self._be_as_then(phase)
            return None  # the others are in a later call of `steps`
        if history.kept is not None:
            with self.core.loop.guard.updating():
                history.kept.put_back(state.replica, self.core.loop.registered)
            history.kept = None
        history.catches_up, state.open_call = False, phase
        self.core.recovery.exits.begin()
        if phase > state.position.phase:
            state.position, state.stop_at = state.position.next_phase(), None
            self.core.journal.leave_epoch()
        first = state.position
        last = first.first_number + call.last
        check_last_batch(call.loader, state.options, state.world.dp_size)
        state.ended = False
        if not joined:  # who joins has done so with the others
            state.emit(announcement(state, call.loader, call.epochs, last))
            self._open_records(again=phase > 0)
        if behind:
            self._be_as_then(phase)
            state.ended, state.open_call = True, None
            return None
        return Stepping(
            core=self.core,
            group=self.group,
            saving=self.saving,
            call=call,
            last=last,
            epochs=None if call.epochs is None else first.first_epoch + call.epochs,
        )

    def _check_before(self, call: StepsCall) -> None:
        """Raise where the call before was left in a way that no other may follow, or the batch is another."""
        state = self.core.state
        self.saving.check_asked()
        self.core.loop.body.attempt = None  # of a step that a call before this was left in the middle of
        if self.core.recovery.exits.pending:
            self.core.recovery.together(SAVE, lambda: None)
            state.check_whole("the loop was left")
        if state.meta.get("batch_size") is None:  # also of a run that was saved before its first step
            state.meta["batch_size"] = call.loader.batch_size
        check_batch_size(state.meta["batch_size"], call.loader.batch_size)
        check_turns(state.meta, call.turns, state.position, call.phase)

    def _open_records(self, *, again: bool) -> None:
        """Begin the records and the snapshots of a call of `steps`; a worker may be lost between two of them."""

        def begin() -> None:
            self.core.records.begin(lambda: new_receipt(self.core.state, self.core.state.position))
            self.group.begin_snapshots()

        if again:
            self.core.recovery.together(SAVE, begin)
        else:
            begin()

    # Calls that are over, and the place where a run was saved.

    def _skip(self, phase: int) -> None:
        """Go by a call of `steps` that was done before the run was resumed, or before this worker joined it."""
        state, history = self.core.state, self.core.history
        self._be_as_then(phase)
        if history.catches_up:
            return
        history.skipped = True
        state.seed_loop("call", phase + 1)
        if phase == 0:
            state.emit(
                Note(
                    text=f"this run was resumed in call {state.position.phase + 1} of run.steps; the calls before it are "
                    "skipped. run.evaluate between them returns what it returned then; what else the loop learned there (a "
                    "best score) is there if run.register holds it. The weights are not those of then: write "
                    "`if not run.replaying:` before what saves them."
                )
            )

    def _be_as_then(self, phase: int) -> None:
        """Restore the registered states and the learning rates that held behind this call of `steps`."""
        if self.core.history.behind.holds(phase, LEFT):
            then = self.core.history.behind.next(phase, LEFT)
            self.core.loop.registered.give_known(then["states"])
            optimizer = self.core.state.replica.optimizer
            for one in each_of(optimizer):
                mark_stepped(one)  # steps were taken by then
            set_options(optimizer, then["options"])

    def _find_place(self, call: StepsCall) -> bool:
        """Load the state of a resumed run where its call of `steps` begins; return whether it was saved behind this call.

        Then that `run.save` loads it.
        """
        history, phase, at = self.core.history, call.phase, self.core.state.position
        more = (call.epochs is None or at.epoch < at.first_epoch + call.epochs) and (
            at.number < at.first_number + call.last
        )
        resumed, history.resumed = history.resumed, False
        self.core.loop.body.note_beginning()
        self._check_taken_up(phase)
        over = history.behind.has_save(phase) and history.behind.left_early(phase)
        if phase == at.phase and more and not over:
            # It came to its end where the run was saved, and has been given more steps.
            history.behind.drop(phase)
        if history.behind.has_save(phase):
            history.skipped = False
            return True
        if resumed and not history.catches_up:
            self._note_unregistered()
            changed = self._changed()
            if changed or history.skipped or self.preparation.lacks_groups:
                self.preparation.resume_again()
            self.preparation.set_changed()
        return False

    def _note_unregistered(self) -> None:
        if self.core.state.task is None and not self.core.loop.registered:
            self.core.state.emit(
                Note(
                    text="this run is resumed with its weights, its optimizer and the schedule that run.prepare was given. What "
                    "else the loop keeps (a moving average of the weights, a best score) begins anew: hand it to "
                    "run.register, and it is saved and resumed too."
                )
            )

    def _changed(self) -> bool:
        """Return whether some worker's loop has changed what was resumed: loaded other weights, set a rate, made a schedule."""
        mine = self.core.loop.body.beginning_changed or self.core.loop.registered.moved()
        return any(all_gather_object(self.core.state.world.comm, mine))

    def _check_taken_up(self, phase: int | None = None) -> None:
        """Raise where the function has gone by the place that the run was saved at, and would do once more what it did before."""
        history, at = self.core.history, self.core.state.position
        saved_in = at.phase + 1
        if phase is None and history.skipped:
            raise InputError(
                f"this run was saved in call {saved_in} of run.steps, and the function ended behind call {history.calls}: "
                f"{_DECIDE}"
            )
        late = history.before if phase == 0 and not history.catches_up else history.behind
        call = -1 if phase == 0 else at.phase
        if (phase is None or phase > call) and late.has_save(call) and not self.core.state.waits_to_join:
            raise InputError(
                f"this run was saved by a run.save() {'before the first call' if call < 0 else f'behind call {saved_in}'} of "
                f"run.steps, and the function did not come to it again: {_DECIDE}"
            )

    # Leaving the loop.

    def _note_left(self, phase: int, *, ended: bool = False) -> None:
        """Announce that this worker has left a call of `steps`; an iterator may be closed long after the next began."""
        state = self.core.state
        if phase == state.position.phase and not (state.waits_to_join or self.core.history.catches_up):
            unfinished = state.step is not None and state.step.again and not ended
            number = state.position.number
            self.core.recovery.exits.note(state.world, phase, number, ended=ended, unfinished=unfinished)

    def finish(self) -> None:
        """Save what a loop did that was left with `break`; for whoever started the run, when its function has returned."""
        state, history = self.core.state, self.core.history
        self.replay.take_back()
        self.core.loop.guard.take_past_back()
        if history.calls and not history.catches_up:
            self._check_taken_up()
            if self.core.loop.schedule is not None and (text := self.core.loop.schedule.note()) is not None:
                state.emit(Note(text=text))
        if not state.in_training or history.catches_up:
            return
        self._note_left(state.position.phase)
        self.core.journal.read_pending()
        # All are to have left at the same step.
        left_open = self.core.recovery.together(
            SAVE, lambda: any(all_gather_object(state.world.comm, state.left_open))
        )
        left_at = state.position.number
        if left_open:
            state.emit(
                Note(
                    text=f"the loop was left in the middle of step {left_at}, before step.apply(), and forward may have "
                    "changed the model's buffers: no last checkpoint is written, for a resumed run takes that step once more."
                )
            )
        else:
            self.saving.at_the_end()
        if state.position.number != left_at:
            raise RolledBackError(state.position.number)  # no loop is there to take those steps once more
        state.ended = True
        self.core.records.finish()
