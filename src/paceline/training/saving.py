"""When a run saves, and what becomes of it: one saver for its whole life, because a save may be in flight between two calls."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim import Optimizer

from paceline.checkpoint.best import Score
from paceline.checkpoint.contents import CheckpointMetadata
from paceline.checkpoint.parts import AVERAGED
from paceline.checkpoint.pending_checkpoint import Fault
from paceline.checkpoint.saver import Saver
from paceline.checkpoint.store import Checkpoints
from paceline.checkpoint.writing import Saved
from paceline.errors import DiskFaultError, InputError
from paceline.observe import CheckpointSaved, Note
from paceline.recovery.agreement import WentBackError
from paceline.recovery.membership import EVALUATE, SAVE
from paceline.recovery.position import Position
from paceline.state.optimizer_state import check_dense, check_form
from paceline.strategies.in_turns.optimizers import each_of
from paceline.training import folder
from paceline.training.checks.epoch_starts import KEY as STREAM
from paceline.training.checks.nonfinite import check_weights
from paceline.training.core import EngineCore
from paceline.training.frozen import KEY as FROZEN
from paceline.training.frozen import frozen_names
from paceline.training.horizon import KEY as HORIZON
from paceline.training.preparation import Preparation
from paceline.training.saved_attributes import KEY as CHANGED
from paceline.training.scoring import Scoring
from paceline.training.turns import KEY as TURNS
from paceline.training.user_loop.call_history import KEY as OUTCOMES
from paceline.training.user_loop.call_history import SAVE as SAVE_CALL
from paceline.training.user_loop.loop_state import KEY as REGISTERED
from paceline.world import all_gather_object

NO_FOLDER = "run.save needs a folder. Give out= to paceline.launch."


@dataclass(kw_only=True)
class Saving:
    """The checkpoints of one run, as one worker takes part in them."""

    core: EngineCore
    preparation: Preparation
    saver: Saver | None = field(default=None, init=False)
    """None in a run without a folder."""
    saved_at: Position | None = field(default=None, init=False)
    """Where the run stood at its last checkpoint, alike on all workers: whoever has it does not write it again."""
    then: Callable[[int, str], None] = field(default=lambda *_: None, init=False)
    """What else is to be called on the worker that has committed a checkpoint, with its step and its folder."""
    first: Callable[[], None] = field(default=lambda *_: None, init=False)
    """What is to be called on each worker before it begins to write a checkpoint."""
    _looked_at: WeakKeyDictionary[Optimizer, int] = field(default_factory=WeakKeyDictionary, init=False)
    """How many parameters had state when each optimizer's was looked at."""
    _asked: bool = field(default=False, init=False)
    """Whether the loop has asked for a checkpoint in a body that has not ended."""

    def __post_init__(self) -> None:
        self.scoring = Scoring(core=self.core)
        options = self.core.state.options
        self._in_folder = options.out is not None and (options.out / folder.SPEC).exists()
        if options.out is not None:
            place = options.out / folder.CHECKPOINTS
            checkpoints = Checkpoints(place, keep=options.keep, keep_best=options.keep_best)
            self.saver = Saver(checkpoints, saved=self._note_saved, note=self._note)

    def _note_saved(self, made: Saved) -> None:
        self.core.records.after_save(made.step, made.weights_sha256)
        self.core.state.emit(CheckpointSaved(step=made.step, path=str(made.path), seconds=made.seconds))
        self.then(made.step, str(made.path))

    def _note(self, text: str) -> None:
        self.core.state.emit(Note(text=text))

    # What the loop asks for.

    def save_on_request(self, score: Score | None = None) -> None:
        """Write the checkpoint that the loop asks for here, or when the body that it is in ends.

        One with a `score` is written only if it is among the best so far.
        """
        state, history = self.core.state, self.core.history
        state.check_between(SAVE_CALL)
        if state.open_call is not None:
            if score is None or self._is_among_best(score):
                self._ask()
            return
        if not (state.waits_to_join or history.elsewhere):
            if history.outcomes.has_save(history.call):
                self._pass_by_save()
                return
            if history.resumed:
                return  # the run is further than this, and what it was saved with must stay
            if score is not None and not self._is_among_best(score):
                return
            history.outcomes.note(history.call, SAVE_CALL, None)
        self.save(called=SAVE_CALL)

    def _is_among_best(self, score: Score) -> bool:
        if self.saver is None:
            raise InputError(NO_FOLDER)
        return self.scoring.admits(score, self.saver.checkpoints)

    def _ask(self) -> None:
        """Have a checkpoint written when the body of the present step ends: what the body still does belongs to it.

        A checkpoint stands at the beginning of the next step, and a run that goes on from there does nothing of this body again.
        """
        if self.saver is None:
            raise InputError(NO_FOLDER)
        self.core.recovery.together(EVALUATE, lambda: None, called=SAVE_CALL)
        self._asked = True

    def _pass_by_save(self) -> None:
        """Be where the run was saved between two calls of `steps`, once the function has come there again."""
        history = self.core.history

        def load() -> None:
            self.preparation.resume_again()
            # Whoever gets further knows that all have the state.
            all_gather_object(self.core.state.world.comm, None)

        if history.outcomes.holds(history.call, SAVE_CALL):
            history.outcomes.next(history.call, SAVE_CALL)
            if not history.outcomes.has_save(history.call):
                self.core.recovery.together(SAVE, load)

    def check_asked(self) -> None:
        """Raise where another call of `run.steps` begins, and the body that asked for a checkpoint has not ended."""
        if self._asked:
            raise InputError(
                "run.save() was called in the body of a loop that was then left with break, and what a run resumed from there "
                "would do next is not known. Call run.save() behind the loop; where its iterator has a name "
                "(it = run.steps(...)), call it.close() before."
            )

    # What is written.

    def after_body(self, *, again: bool, due: bool, last: bool) -> None:
        """Write a checkpoint that is due, or that the body has asked for; one behind the `last` step comes by itself.

        A body that is run `again` asks for it again. A disk that fails does not end a run that can go on without a due one.
        """
        self._check_savable()
        asked, self._asked = self._asked and not again, self._asked and last and not again
        if again or last or not (asked or due):
            return
        try:
            with suppress(WentBackError):
                self.save()
        except DiskFaultError as error:
            if asked:
                raise
            self._note(f"{error} Training goes on; the next checkpoint is tried when it is due.")

    def _check_savable(self) -> None:
        """Raise, as soon as a parameter has such state, where it cannot be told or saved: not only when a checkpoint is due."""
        for optimizer in each_of(self.core.state.replica.optimizer):
            if self._looked_at.get(optimizer) != len(optimizer.state):
                self._looked_at[optimizer] = len(optimizer.state)
                check_form(optimizer)
                if self.saver is not None:
                    check_dense(optimizer)

    def save(self, *, last: bool = False, called: str | None = None) -> None:
        """Write a checkpoint of where the run stands, with all workers; `called` is the name by which the loop asks for it."""
        state, saver = self.core.state, self.saver
        self.core.journal.read_pending()
        if state.waits_to_join or self.core.history.elsewhere:
            return  # the run is elsewhere still
        if saver is None:
            raise InputError(NO_FOLDER)
        if called is not None:
            # Apart from the save itself, for which a slow disk is waited for ten times as long.
            self.core.recovery.together(EVALUATE, lambda: None, called=called)
        if state.options.resume:
            saver.checkpoints.own.add(state.started_at)
        fault = self.core.recovery.together(SAVE, partial(self._write, saver, last=last))
        if fault:
            raise fault.error()
        self.saved_at, self._asked = state.position, False
        self.core.sharded.note_checkpoint(state.position, self.core.journal.state)
        there = list[int]()
        with suppress(OSError):  # whoever writes there says so
            there = folder.steps(state.options.out)
        self.core.changed.note_saved(state.position.number, state.replica.model, state.task, there)

    def _write(self, saver: Saver, *, last: bool) -> Fault:
        """Write this worker's part with all others; return what went wrong, the same on all.

        All wait until it is there, or is not; where the run saves beside the training, only until it is copied. The `last`
        one of a run is always waited for, and written only if the one before is not of this very step.
        """
        state = self.core.state
        self._look_for_folder()
        # Workers that have gone their own ways are brought to one state.
        with self.core.loop.guard.updating():
            replica, world = state.replica, state.world
            self.first()
            self.core.records.before_save()
            with self.core.loop.body.left_out():
                replica.synchronize()
            check_weights(replica, world, state.position.number)
            metadata = CheckpointMetadata(
                step=state.position.number, position=asdict(state.position), meta=self._meta()
            )
            held = replica.local_state()
            more: dict[str, Any] = {}
            if self.core.loop.registered:
                more[REGISTERED] = self.core.loop.registered.check_same(world)
            if self.core.history.outcomes:
                more[OUTCOMES] = self.core.history.outcomes.state()
            if (began := state.epoch_starts.at(state.position)) is not None:
                more[STREAM] = began
            computes = replica.placement.computes
            changed = self.core.changed.to_save(
                world,
                replica.model,
                state.task,
                computes=computes,
                registered=self.core.loop.registered.objects(),
            )
            if changed is not None:
                more[CHANGED] = changed
            return saver.save(
                world,
                replace(held, extra_state={**held.extra_state, **more}),
                metadata,
                background=state.options.save_async and not last,
                unless_saved=last and self.saved_at == state.position and not self._asked,
            )

    def _look_for_folder(self) -> None:
        """Tell, once, that the run's folder is gone; the run goes on, for its weights would be lost with it."""
        out = self.core.state.options.out
        if self._in_folder and out is not None and not (out / folder.SPEC).exists():
            self._in_folder = False
            self._note(
                f"{out} was moved or removed while the run was in progress. Checkpoints go into a new folder of that name; "
                "what was recorded before (ledger, events, logs) is not there."
            )

    def _meta(self) -> dict[str, Any]:
        """Return what a checkpoint says of its run."""
        state, options, world = self.core.state, self.core.state.options, self.core.state.world
        return {
            "task": state.name,
            "batch_size": state.meta.get("batch_size"),
            "exactness": str(state.exactness),
            **{key: state.about[key] for key in (HORIZON,) if key in state.about},
            # Of a Task, which has one training set; a loop may go from one set to another.
            **({"stream": state.training[0].order is None} if state.about and state.training else {}),
            "samples": self.samples,
            **self.scoring.meta(),
            **({AVERAGED: True} if state.average is not None and state.average.evaluated else {}),
            **self.core.journal.epoch_sums(),
            "seed": options.seed,
            "shards": options.total_shards,
            "strategy": options.strategy,
            "mesh": str(world.mesh),
            **({FROZEN: frozen_names(state.replica.model)} if state.replica.whole else {}),
            **({TURNS: state.meta[TURNS]} if TURNS in state.meta else {}),
            "workers": options.workers if options.processes == 1 else world.size - world.mesh.servers,
        }

    @property
    def samples(self) -> int:
        """The samples of the whole run, what came before a resume included."""
        return int(self.core.state.meta.get("samples", 0)) + self.core.journal.samples

    def at_the_end(self) -> None:
        """Write the last checkpoint, unless there is one of this very step or nothing was done."""
        state = self.core.state
        number, out = state.position.number, state.options.out
        saved = self.saved_at == state.position and not (self._asked or state.options.save_async)
        if number <= state.started_at:
            return
        if self.saver is None:
            with suppress(WentBackError):
                self.core.recovery.together(
                    SAVE, lambda: check_weights(state.replica, state.world, state.position.number)
                )
        elif not saved:
            try:
                with suppress(WentBackError):
                    self.save(last=True)
            except DiskFaultError as error:
                newest = folder.newest_step(out)
                left = (
                    "no checkpoint was saved"
                    if newest is None
                    else f"the newest checkpoint is of step {newest}"
                )
                raise DiskFaultError(
                    f"{error} All {state.position.number} steps were taken, but {left}; {out} is kept."
                ) from error

    # A save in flight.

    def go_back(self, position: Position) -> None:
        """Know that the run stands at an earlier step again."""
        if self.saved_at != position:
            self.saved_at = None
        self._asked = False

    def wait(self) -> None:
        """Wait for a checkpoint that is being written."""
        if self.saver is not None:
            self.saver.wait()

    def abandon(self) -> None:
        """Abandon the save in flight: the group is broken."""
        if self.saver is not None:
            self.saver.abandon()

    def close(self) -> None:
        """Release what saves."""
        if self.saver is not None:
            self.saver.close()
