"""`Run`: the surface on which a training loop is written, paceline's own included.

def main(run: paceline.Run):
    model, optimizer = run.prepare(model, optimizer)
    for step in run.steps(dataset, batch_size=128, epochs=3):
        for batch in step:
            step.backward(loss_sum, weight)
        step.apply(max_grad_norm=1.0)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline import strategies
from paceline.checkpoint import weights_sha256
from paceline.data import ShardedLoader, owned_shards
from paceline.data.loaders import is_loader, merged, note_batches
from paceline.errors import InputError
from paceline.observe import Event, Note, RunStarted
from paceline.records.receipt import Start
from paceline.state.chunks import LocalState
from paceline.state.optimizer_state import drop_groups, options_of, set_options
from paceline.strategies.base import Exactness, MetricsFunction, OpenReplica, StrategyInputs
from paceline.strategies.buffers import Rule
from paceline.strategies.precision import Precision
from paceline.strategies.structure import Structure
from paceline.task import Task
from paceline.training import folder, resuming, schedules, sharded_recovery
from paceline.training.attempt import Attempt, Body, Options, put_options
from paceline.training.between import LEFT, Between
from paceline.training.between import SAVE as SAVE_CALL
from paceline.training.checks import (
    check_batch_size,
    check_clip,
    check_last_batch,
    last_step,
    promise,
    read_ends,
)
from paceline.training.evaluation import evaluate
from paceline.training.frozen import KEY as FROZEN
from paceline.training.frozen import freeze_as, frozen_names
from paceline.training.handle import Handle
from paceline.training.handover import BEGINNING, CHECKPOINT, WORKERS, Source
from paceline.training.hidden_state import HiddenState
from paceline.training.horizon import KEY as HORIZON
from paceline.training.journal import Journal
from paceline.training.leaving import Leaving
from paceline.training.listeners import Listeners
from paceline.training.loop_guard import LoopGuard
from paceline.training.loop_state import LoopState, Values
from paceline.training.meeting import meet
from paceline.training.membership import EVALUATE, SAVE, STATE_LOST, FixedMembership, Membership
from paceline.training.options import RunOptions, SaveEvery
from paceline.training.position import Position
from paceline.training.preparing import (
    ONE_MODEL,
    MakeModel,
    MakeOptimizer,
    MakeScheduler,
    kept_parts,
    new_parts,
)
from paceline.training.put_aside import PutAside
from paceline.training.recorder import DataFacts, describe_start, open_records
from paceline.training.recovery import Recovery, RolledBackError
from paceline.training.saving import Saving
from paceline.training.sharded_recovery import ShardedRecovery
from paceline.training.step import Step
from paceline.training.stepping import Stepping
from paceline.world import Identity, World, all_gather_object, broadcast_object, connect, determinism, seeds
from paceline.world.status_page import NoStatusPage, Phase
from paceline.world.world import THREADS

STARTING, ENDED = Phase.STARTING, Phase.ENDED
DEFAULT_BATCH = 32
NO_BITS = (
    "this strategy promises no bits (statistical): the resumed run is one like the one that was left, but its weights will be "
    "others than if it had not been left."
)


class Run:
    """One worker's hold on a run: its world, its replica, its data, its checkpoints."""

    name = "run"
    _aside: PutAside | None = None
    """The state that this worker was given when it joined, while it goes by calls of `steps` that are over."""
    _resumed = False
    """Whether the run was resumed and its steps have not begun."""
    _skipped = False
    """Whether calls of `steps` have been gone by, and the one that the run was resumed in has not begun."""
    _lacks_groups = False
    """Whether the optimizer of a resumed run has yet to get groups that the function, or the checkpoint, gives it."""
    task: Task | None = None
    """The task that is trained, where it is not a loop of the user's own; it is told how far the run is."""

    _step: Step | None = None
    """The one that was given last."""
    _data_of_others: tuple[DataFacts, float | None] | None = None
    """What the others train on, for a worker that has joined them before its first call of `steps`."""
    _adopted: Values
    """The loop's own states, as this worker was given them when it joined."""
    _calls = 0
    """How often `steps` has been called."""
    _taken_back = False
    """Whether the run has gone back into a call of `steps` that had ended."""
    _catches_up = False
    """Whether this worker has joined a run that is in a later call of `steps`."""
    _inside: int | None = None
    """Which call of `steps` has the turn, None outside of them."""
    _schedules_seen = False
    """Whether schedules of the loop's own were looked for: they are there by the end of the first step."""
    _doubted = False
    """Whether the user was told that a list may hold batches: once a run is enough."""

    def __init__(
        self,
        world: World,
        options: RunOptions,
        membership: Membership | None = None,
        listeners: Listeners | None = None,
    ) -> None:
        self.options, self.choice = options, options.choice
        world.pulse.timeout_s = options.hang_timeout
        self.world = self.laid_out(world)
        """Whom this worker works with; another one after each change of the group."""
        self.strategy = strategies.load(self.choice.name)
        self.exactness = promise(self.strategy, options)
        self.position = Position()
        self.started_at = 0
        """The step this process started from: above 0 in a resumed run."""
        self.workers = self.present_workers
        """How many the run began with, on all machines; servers are not counted."""
        self._listeners = listeners
        self._recovery = Recovery(self, membership or FixedMembership())
        self.cut = ShardedRecovery(options)
        self.ended = False
        """Whether the steps have all been taken."""
        self.parameters = 0
        """Of the model, on all workers together."""
        self._parts: StrategyInputs | None = None
        self._handle: Handle | None = None
        """What a loop of the user's own holds."""
        self._replica: OpenReplica | None = None
        self.guard = LoopGuard(self._seed_update)
        """Finds what a loop does that is done for it."""
        self._journal = Journal(self.emit, world.device)
        self._feeds: list[ShardedLoader] = []
        self._meta: dict[str, Any] = {}
        self._begun: tuple[ShardedLoader, float | None] | None = None
        self.between, self._before = Between(), Between()  # before the first call: saved there alone
        self.loop_state = LoopState()
        """What the loop has registered beside model, optimizer and schedule."""
        self._body = Body(lambda: self.replica, self.loop_state)
        """What the body of the user's loop does to the state."""
        self._leaving = Leaving()
        self._states: Values = {}
        """What that was where the run goes on, should it go back."""
        self.hidden = HiddenState()
        self._records = open_records(options, self.world)
        self._saving = Saving(self, self._recovery, self._records)
        self.about: dict[str, Any] = {}
        """What the loop says of itself, for the receipt."""
        if self.exactness is Exactness.BITWISE:
            determinism.select_kernels(world.device, compiled=options.compile)
        seeds.seed_everything(seeds.derive(options.seed, "model"))

    @classmethod
    def join(
        cls,
        identity: Identity,
        options: RunOptions,
        events: int | None = None,
        membership: Membership | None = None,
        pulse: NoStatusPage | None = None,
        *,
        check_folder: bool = True,
    ) -> Run:
        """Enter the world as `identity` and make the run; rank 0 sends events to the descriptor `events`."""
        membership = membership or FixedMembership()
        if check_folder and not membership.newcomer:
            folder.check(options)
        if pulse is not None:
            pulse.enter(STARTING)
        world = connect(
            identity,
            backend=options.backend,
            device=options.device,
            checked=options.check_collectives,
            pulse=pulse,
        )
        listeners = Listeners(options, events)
        listeners.listen(first=world.is_first and not membership.newcomer)
        return cls(world, options, membership, listeners)

    # Preparing.

    def prepare(
        self,
        model: nn.Module | MakeModel,
        optimizer: Optimizer | MakeOptimizer,
        scheduler: LRScheduler | MakeScheduler | None = None,
        buffers: Mapping[str, Rule] | None = None,
        structure: Structure | None = None,
    ) -> tuple[nn.Module, Optimizer]:
        """Place the model, wire up its gradients, and take over the state of a run that is being resumed."""
        with seeds.preserved():
            replica = self.prepare_replica(model, optimizer, scheduler, buffers, structure)
        if not isinstance(model, nn.Module):
            self.seed_loop(
                "call", 0
            )  # a function that makes the model begins at the run's seed, which has served
        self._handle = Handle(replica, Precision(self.options.precision, self.world.device))
        return replica.model, replica.optimizer

    def prepare_replica(
        self,
        model: nn.Module | MakeModel,
        optimizer: Optimizer | MakeOptimizer,
        scheduler: LRScheduler | MakeScheduler | None = None,
        buffers: Mapping[str, Rule] | None = None,
        structure: Structure | None = None,
    ) -> OpenReplica:
        """Do the same for a loop that hands the strategy its loss function instead of calling backward."""
        if self._parts is not None:
            raise InputError(
                "run.prepare was called before, and its model would be trained no more. " + ONE_MODEL
            )
        self._parts = parts = new_parts(
            self.options, self.exactness, self.world.device, model, optimizer, scheduler, buffers, structure
        )
        joins = self._recovery.waiting_to_join
        # What needs the others is done when there are any.
        replica = self.strategy.prepare(
            replace(parts, sync_batchnorm=parts.sync_batchnorm and not joins), self.world
        )
        self.adopt_replica(replica)
        for text in getattr(replica, "notes", ()):
            self.emit(Note(text=text))
        if self.options.resume and not joins:
            groups = len(replica.optimizer.param_groups)
            saved = resuming.load(replica, self.options, self.world, self.emit)
            self._lacks_groups = drop_groups(replica.optimizer, groups)
            self.position, self._meta = saved.position, saved.meta
            self.started_at = self.position.number
            outcomes = saved.between or []
            self._before.load([one for one in outcomes if one[0] < 0])
            self.between.load([one for one in outcomes if one[0] >= 0])
            self._freeze()
            self._note_new(self.loop_state.resume(saved.states))
            self._tell_steps()
            self._resumed = True
            if self.exactness is Exactness.STATISTICAL:
                self.emit(Note(text=NO_BITS))
            self.guard.watch(replica)  # its schedule stands elsewhere now
        if self.task is None:
            self._body.note_made()
        self.cut.note_checkpoint(self.position, self._journal)
        return replica

    def _freeze(self) -> None:
        """Have that train which did where the run was saved: the loop's code may have changed it at a step before."""
        names: list[str] | None = self._meta.get(FROZEN)
        if names is not None and (changed := freeze_as(self.replica.model, names)):
            others = f" (and of {len(changed) - 1} more)" if changed[1:] else ""
            self.emit(
                Note(
                    text=f"requires_grad of {changed[0]}{others} is set to {changed[0] not in names}, as it was where this run "
                    "was saved; a loop that sets it itself in its steps goes on doing so, and has nothing to change."
                )
            )
        if self._begun is not None:
            self._meta.pop(FROZEN, None)  # from here on the loop says what trains

    def saved_meta(self) -> dict[str, Any]:
        """Return what the newest checkpoint of a run that is resumed says of it; all workers call it."""
        if not self.options.resume:
            return {}
        meta = resuming.newest_meta(self.options) if self.world.is_first else None
        return broadcast_object(self.world.comm, meta) or {}

    def register_state(self, name: str, value: Any) -> Any:
        """Save an object's state with the run, and return the object: a moving average of the weights, the best score so far.

        It has `state_dict` and `load_state_dict`, or is a dict; what it holds are tensors, numbers, strings, lists and dicts,
        the same on all workers. Call it on every worker before `run.steps`: a resumed run, and a worker that joins, take it over.
        """
        if self._begun is not None:
            raise InputError(
                f"run.register_state({name!r}) came after run.steps. Call it before, on every worker."
            )
        known = self.options.resume and self._replica is not None and not self._recovery.waiting_to_join
        if self.loop_state.register(name, value) or not known:
            return value
        self._note_new([name])
        return value

    def _note_new(self, names: list[str]) -> None:
        for name in names:
            self.emit(Note(text=f"the checkpoint has no state {name!r} of the loop: it begins as it is"))

    @property
    def replica_or_none(self) -> OpenReplica | None:
        """What `prepare` made, if it has."""
        return self._replica

    @property
    def replica(self) -> OpenReplica:
        """What `prepare` made."""
        if self._replica is None:
            raise InputError("run.steps was called before run.prepare(model, optimizer). Prepare first.")
        return self._replica

    @property
    def present_workers(self) -> int:
        """How many there are now, on all machines; servers are not counted."""
        world = self.world
        return self.options.workers if self.strategy.threaded else world.size - world.mesh.servers

    @property
    def repeatable(self) -> bool:
        """Whether what is done outside of the steps can be done once more: a Task's trainer changes nothing there."""
        return self.task is not None

    @property
    def in_training(self) -> bool:
        """Whether steps have been asked for and not all were taken."""
        return self._begun is not None and not self.ended

    # Data and steps.

    def feed(self, data: Any, *, batch_size: int | None = None, **loading: Any) -> ShardedLoader:
        """Open this worker's share of a data set, or of a DataLoader's; the batch is the GLOBAL one (32 where nobody says)."""
        options = self.options
        loading = {"num_workers": options.num_workers, **loading}
        if is_loader(data):
            data, batch_size, loading = merged(data, batch_size, loading)
        doubt = None if self._doubted else note_batches(data)
        if doubt is not None:
            self._doubted = True
            self.emit(Note(text=doubt))
        made = ShardedLoader(
            data,
            batch_size=DEFAULT_BATCH if batch_size is None else batch_size,
            shards=options.total_shards,
            seed=options.seed,
            owned=self._owned,
            micro_batch=options.micro_batch,
            pin_memory=self.world.device.type == "cuda",
            **loading,
        )
        self._feeds.append(made)
        return made

    def steps(
        self,
        data: Any,
        *,
        batch_size: int | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        max_grad_norm: float | None = None,
        after_epoch: Callable[[int], None] | None = None,
    ) -> Iterator[Step]:
        """Yield one `Step` for each optimizer step, from where the run stands to the end of this call.

        A second call goes through other data, or the same once more: epochs and steps count from where it begins. A resumed run
        skips the calls that were done. Leaving the loop with `break` ends the call; all workers must do so at the same step.
        """
        epochs, steps = read_ends(epochs, steps)
        check_clip(max_grad_norm)
        phase = self._next_phase()
        if phase < self.position.phase and not self._recovery.waiting_to_join:
            self._skip(phase)
            return
        feed = data if isinstance(data, ShardedLoader) else self.feed(data, batch_size=batch_size)
        try:
            yield from self._phase(phase, feed, epochs, steps, max_grad_norm, after_epoch)
        except GeneratorExit:
            self._note_left(phase)
            raise
        finally:
            self.world.pulse.enter(
                Phase.QUIET
            )  # what the function does behind its steps may take as long as it likes
            self._taken_back = False
            if self._inside == phase:  # an iterator may be closed long after the next call began
                self._inside = None
                then = {
                    "early": not self.ended,
                    **self.loop_state.small(),
                    **options_of(self.replica.optimizer),
                }
                self.between.note(phase, LEFT, then)
            if phase == self._calls - 1:
                self.seed_loop("call", phase + 1)
            if feed is not data:
                self._close_feed(feed)

    def _skip(self, phase: int) -> None:
        """Go by a call of `steps` that was done before the run was resumed, or before this worker joined it."""
        self._be_as_then(phase)
        if self._catches_up:
            return
        self._skipped = True
        self.seed_loop("call", phase + 1)
        if phase == 0:
            self.emit(
                Note(
                    text=f"this run was resumed in call {self.position.phase + 1} of run.steps; the calls before it are skipped. "
                    "run.evaluate between them returns what it returned then; what else the loop learned there (a best score) "
                    "is there if run.register_state holds it."
                )
            )

    def seed_loop(self, *place: int | str) -> None:
        """Seed what a loop of the user's own draws outside of its batches, by its place in the run: alike on every worker.

        A Task's trainer draws nothing there.
        """
        if self.task is None:
            seeds.seed_everything(seeds.derive(self.options.seed, "loop", *place))

    def _seed_update(self) -> None:
        """Seed what an update draws, noise on gradients say, alike on every worker that is to come to the same weights."""
        if self.exactness is not Exactness.STATISTICAL:
            seeds.seed_everything(seeds.derive(self.options.seed, "update", self.position.number))

    def _changed(self) -> bool:
        """Return whether some worker's loop has changed what was resumed: loaded other weights, set a rate, made a schedule."""
        mine = self._body.beginning_changed or self.loop_state.moved()
        return any(all_gather_object(self.world.comm, mine))

    def _take_up_again(self) -> None:
        """Be where the run was saved: what stands between the calls that were skipped has been done to that state once more."""
        self._skipped, self._resumed, self._lacks_groups = False, False, False
        with self.guard.updating():
            saved = resuming.load(self.replica, self.options, self.world, self.emit)
        if saved.position != self.position:
            raise InputError(
                "another process has written to the folder of this run since it was resumed. Give each run its own."
            )
        self.loop_state.resume(saved.states)
        self._meta[FROZEN] = saved.meta.get(FROZEN)
        self._freeze()
        self.guard.watch(self.replica)

    def _be_as_then(self, phase: int) -> None:
        """Have what a loop decides by be what it was behind a call that is gone by: its own small states, the rates."""
        if self.between.holds(phase, LEFT):
            then = self.between.next(phase, LEFT)
            self.loop_state.give_known(then)
            set_options(self.replica.optimizer, then)

    def _check_taken_up(self, phase: int | None = None) -> None:
        """Raise where the function has gone by the place that the run was saved at, and would do once more what it did before."""
        saved_in = self.position.phase + 1
        if phase is None and self._skipped:
            raise InputError(
                f"this run was saved in call {saved_in} of run.steps, and the function ended behind call {self._calls}: "
                "it decides by something that is not as it was then. Decide by run.evaluate, a step's result, or what "
                "run.register_state holds."
            )
        late = self._before if phase == 0 and not self._catches_up else self.between
        call = -1 if phase == 0 else self.position.phase
        if (phase is None or phase > call) and late.has_save(call) and not self._recovery.waiting_to_join:
            raise InputError(
                f"this run was saved by a run.save() {'before the first call' if call < 0 else f'behind call {saved_in}'} of "
                "run.steps, and the function did not come to it again: it decides by something that is not as it was then. "
                "Decide by run.evaluate, a step's result, or what run.register_state holds."
            )

    def _find_place(self, phase: int, *, more: bool) -> bool:
        """Take up the state of a resumed run where its call of `steps` begins, or return that it was saved behind this call.

        Then the state is taken up at that `run.save`. With `more` there are steps to take in the call that the run stands in.
        """
        resumed, self._resumed = self._resumed, False
        self._body.note_beginning()
        self._check_taken_up(phase)
        over = self.between.has_save(phase) and self.between.left_early(phase)
        if phase == self.position.phase and more and not over:
            self.between.drop(
                phase
            )  # it came to its end where the run was saved, and has been given more steps
        if self.between.has_save(phase):
            self._skipped = False
            return True
        if resumed and not self._catches_up:
            changed = self._changed()
            if changed or self._skipped or self._lacks_groups:
                self._take_up_again()
        return False

    def _goes_on(self, feed: ShardedLoader, epochs: int | None, steps: int | None) -> bool:
        """Return whether steps are left of the call of `steps` in which the run stands."""
        at, last = self.position, last_step(feed, epochs, steps)
        return (epochs is None or at.epoch < at.first_epoch + epochs) and at.number < at.first_number + last

    @property
    def takes_steps(self) -> bool:
        """Whether a call of `steps` has the turn."""
        return self._inside is not None

    def _next_phase(self) -> int:
        """Return which call of `steps` this is: the same once more where the run has gone back into it."""
        if not self._taken_back:
            self._calls += 1
        return self._calls - 1

    def _phase(
        self,
        phase: int,
        feed: ShardedLoader,
        epochs: int | None,
        steps: int | None,
        max_grad_norm: float | None,
        after_epoch: Callable[[int], None] | None,
    ) -> Iterator[Step]:
        self._saving.check_asked()
        self._schedules_seen = False
        self._body.attempt = None  # of a step that a call before this was left in the middle of
        if self._leaving.pending:
            self._recovery.together(SAVE, lambda: None)
            self._check_whole("the loop was left")
        if self._meta.get("batch_size") is None:  # also of a run that was saved before its first step
            self._meta["batch_size"] = feed.batch_size
        check_batch_size(self._meta["batch_size"], feed.batch_size)
        self._begun = feed, max_grad_norm
        self._catches_up |= self._recovery.waiting_to_join
        joined = self._catches_up
        behind = self._find_place(phase, more=self._goes_on(feed, epochs, steps))
        self._freeze()
        self.loop_state.begin()
        self._recovery.begin()
        if phase < self.position.phase:
            self._aside = self._aside or PutAside(self.replica, self.loop_state)
            self._be_as_then(phase)
            return  # the others are in a later call of `steps`
        if self._aside is not None:
            with self.guard.updating():
                self._aside.put_back(self.replica, self.loop_state)
            self._aside = None
        self._catches_up, self._inside = False, phase
        self._leaving.begin()
        if phase > self.position.phase:
            self.position = self.position.next_phase()
            self._journal.leave_epoch()
        first = self.position
        last = first.first_number + last_step(feed, epochs, steps)
        check_last_batch(feed, self.options, self.world.dp_size)
        self.ended = False
        if not joined:  # who joins has done so with the others
            self.emit(self._announcement(feed, epochs, last))
            self._open_books(again=phase > 0)
        if behind:
            self._be_as_then(phase)
            self.ended, self._inside = True, None
            return
        stepping = Stepping(
            run=self,
            recovery=self._recovery,
            saving=self._saving,
            feed=feed,
            max_grad_norm=max_grad_norm,
            last=last,
            epochs=None if epochs is None else first.first_epoch + epochs,
            due=SaveEvery.parse(self.options.save_every) if self.options.save_every else SaveEvery(),
            after_epoch=after_epoch,
        )
        while not self.ended:
            yield from stepping.take()
            self._note_left(phase, ended=True)
            self._journal.settle()
            self._saving.at_the_end()
            # A worker may have been lost in that very checkpoint, and steps with it.
            self.ended = not stepping.left
        self._records.finish()

    def _open_books(self, *, again: bool) -> None:
        """Begin the records and the copies of a call of `steps`; a worker may be lost between two of them."""

        def begin() -> None:
            self._records.begin(*self._description(self.position))
            self.cut.attach(self.world, self.replica)
            self._copy()

        if again:
            self._recovery.together(SAVE, begin)
        else:
            begin()

    def finish(self) -> None:
        """Save what a loop did that was left with `break`; for whoever started the run, when its function has returned."""
        if self._calls and not self._catches_up:
            self._check_taken_up()
        if self._begun is not None and not (self.ended or self._catches_up):
            self._note_left(self.position.phase)
            self._journal.settle()
            # All are to have left at the same step.
            left_open = self._recovery.together(
                SAVE, lambda: any(all_gather_object(self.world.comm, self._left_open))
            )
            left_at = self.position.number
            if left_open:
                self.emit(
                    Note(
                        text=f"the loop was left in the middle of step {left_at}, before step.apply(), and forward may have "
                        "changed the model's buffers: no last checkpoint is written, for a resumed run takes that step once more."
                    )
                )
            else:
                self._saving.at_the_end()
            if self.position.number != left_at:
                raise RolledBackError(self.position.number)  # no loop is there to take those steps once more
            self.ended = True
            self._records.finish()

    @property
    def _left_open(self) -> bool:
        """Whether the last step has gone through a model with buffers and was not applied."""
        return (
            self._step is not None
            and self._step.left_open
            and next(self.replica.model.buffers(), None) is not None
        )

    def _check_whole(self, what: str) -> None:
        """Raise in the middle of a step: a state of there is that of no step."""
        if self._left_open:
            raise InputError(
                f"{what} in the middle of step {self.position.number}, before step.apply(), and forward may have changed the "
                "model's buffers by then. Do it behind step.apply()."
            )

    def _note_left(self, phase: int, *, ended: bool = False) -> None:
        """Announce that this worker has left a call of `steps`; an iterator may be closed long after the next began."""
        if phase == self.position.phase and not (self._recovery.waiting_to_join or self._catches_up):
            unfinished = self._step is not None and self._step.again and not ended
            self._leaving.note(self.world, phase, self.position.number, ended=ended, unfinished=unfinished)

    def check_met(self, called: str) -> None:
        """Raise where this worker calls something that others do not."""
        meet(self.world, called)

    def check_left(self) -> None:
        """Raise where this worker has left a call of `steps` at another step than the others."""
        self._leaving.check(self.world)

    def check_present(self, number: int) -> None:
        """Raise where another worker has left the call of `steps` in which this one is at a step."""
        self._leaving.check_present(self.world, self.position.phase, number)

    def _close_feed(self, feed: ShardedLoader) -> None:
        self._feeds.remove(feed)
        feed.close()

    def end_step(self) -> None:
        """Note that the loop has done with a step, its own states included."""
        if not self._schedules_seen:
            self._schedules_seen = True
            self._check_schedules()
        self.guard.end_step()
        if self.cut.due(self.position):
            self._copy()

    def _check_schedules(self) -> None:
        """Raise where the loop has a schedule that is lost with the process, and another process may go on with the run."""
        several = self.world.size > 1 and self._recovery.membership.elastic
        if self.task is None and (self.options.out is not None or several):
            kept = [getattr(self.replica, "scheduler", None), *self.loop_state.objects()]
            schedules.check_kept(self.replica.optimizer, kept)

    def begin_attempt(self) -> Attempt | None:
        """Note what a step begins with, should it be given once more; a Task's trainer changes nothing beside it."""
        self._body.attempt = None
        if self.task is not None or self.world.size == 1 or not self._recovery.membership.elastic:
            return None
        return self._body.begin()

    def break_off(self, *, in_step: bool) -> tuple[bool, bool]:
        """Put back what a body did in a step that broke; return whether it wrote to the model in it, and behind the last."""
        attempt = self._body.attempt
        if self._replica is None or attempt is None or not in_step:
            return False, self._replica is not None and self._body.moved
        attempt.put_back()
        return attempt.dirty, self._body.moved

    @property
    def options_then(self) -> Options | None:
        """The optimizer's options right behind the last step that was applied."""
        return self._body.options_then

    def be_behind_step(self, options: Options | None) -> None:
        """Take over the optimizer's options of right behind a step that others have finished, not those of further on."""
        if options is not None:
            put_options(self.replica.optimizer, options)

    def record_step(self, step: Step) -> None:
        """Enter a step in the books before any of it can reach another worker: others may finish it while this one is killed."""
        self._tell_steps()
        self._step = step
        self.hidden.enter(self.replica.model, self.task)
        self._records.step(step, self.position)

    def _tell_steps(self) -> None:
        if self.task is not None:
            self.task.steps_done = self.position.number

    def end_after_epoch(self) -> None:
        """Note that the loop has done with the end of an epoch: a copy that was taken on the way is of no place to begin at."""
        if self.cut.due(self.position):
            self._copy()

    def end_epoch(self) -> None:
        """Stand at the beginning of the next epoch."""
        self.position = self.position.next_epoch()
        self._journal.end_epoch(self.position)

    def step_applied(self, step: Step) -> None:
        """Stand behind a step that has just been applied."""
        self.position = self.position.after_step()
        if step.attempt is not None:
            self._body.applied(step.attempt)
        self._tell_steps()
        for text in self.hidden.check(step.number, several=self.world.size > 1):
            self.emit(Note(text=text))
        self._saving.poll()
        self._journal.step(step, self.position, self.replica.optimizer)
        self.cut.note_step(self.position, self._journal)
        self._recovery.settle()
        self.world.pulse.end()

    def _description(self, position: Position) -> tuple[str, int, int, Callable[[], Start]]:
        """Return what the books are begun with."""
        feed, max_grad_norm = self._begun or self._data_of_others or (None, None)
        if feed is None:
            raise RuntimeError("records are begun with the steps")
        if position.step == feed.steps_per_epoch:
            position = position.next_epoch()

        def describe() -> Start:
            facts: dict[str, Any] = {
                "exactness": str(self.exactness),
                "max_grad_norm": max_grad_norm,
                "about": self.about,
            }
            facts["transport"] = self.transport
            return describe_start(self.options, self.world, position, feed, **facts)

        return self.name, self.options.seed, feed.batch_size, describe

    # A group that breaks, and the next one.

    @property
    def _owned(self) -> range:
        world = self.world
        return owned_shards(world.dp_rank, world.dp_size, self.options.total_shards, world.shares)

    def laid_out(self, world: World) -> World:
        """Return a world with the mesh that its workers make up."""
        return replace(world, mesh=self.choice.fitted(world.size), apart=self.options.tuning.staleness)

    def leave_group(self) -> None:
        """Let go of everybody: nobody may wait for this worker in the old group."""
        self.world.interruption.interrupt()
        self.cut.detach()
        self._saving.abandon()
        if self._replica is not None:
            self._replica.abandon()
        self.world.close()

    def prepare_group(self, before: OpenReplica | None) -> OpenReplica:
        """Prepare for the group that has formed, with what the replica of the one before was made of."""
        if self._parts is None:
            raise RuntimeError("a group is entered when the model is prepared")
        parts = kept_parts(self._parts, before) if before is not None else self._parts
        self.strategy = strategies.load(self.choice.strategy(self.world.mesh))
        with seeds.preserved():  # the loop may draw on behind run.evaluate, in which the group broke
            replica = self.strategy.prepare(parts, self.world)
        if self._handle is not None:
            self._handle.adopt(replica)
        return replica

    def enter_group(self, position: Position, replica: OpenReplica) -> None:
        """Take this worker's place in the group that has formed: its shards, its listeners, its books.

        `position` is where the run goes on: behind a step that others finished and this worker has yet to count.
        """
        self._replica = replica
        self.guard.watch(replica)
        self._body.enter_group()
        for feed in self._feeds:
            feed.own(self._owned)
        if self._listeners is not None:
            self._listeners.listen(first=self.world.is_first)
        self._records.regroup(self.world, *self._description(position))
        self._leaving.enter_group(self.world)
        self.cut.attach(self.world, replica)
        if self.cut.keeps_copies:
            self.cut.copy(position, self.shared_state(), replica, anew=False)

    def await_saves(self) -> None:
        """Let a checkpoint that is being written come to its end: it may be what the others are to go on from."""
        self._saving.wait()

    def fill(self, replica: OpenReplica, source: Source, held: LocalState | None) -> Position:
        """Return a new replica its part of the state from where it is, and say where the run goes on."""
        position = source.position
        if source.kind == CHECKPOINT:
            saved = resuming.load(replica, self.options, self.world, self.emit)
            position, self._states = saved.position, saved.states
            return position
        self._states = self._gather_states(source)
        if source.kind != BEGINNING:
            self.cut.fill(replica, self.world, source, held)
        elif self._body.beginning_changed:
            raise RolledBackError(
                0
            )  # the function does what it did to it once more, when the run starts over
        elif self._parts is not None and not self._parts.remakes:
            raise InputError(
                f"{STATE_LOST}, and no copy or checkpoint has it; the beginning cannot be made "
                "again, because model or optimizer were given ready made. Give run.prepare functions that make them, "
                "--save-every or --peer-snapshots 1."
            )
        return position

    def _gather_states(self, source: Source) -> Values:
        """Return what the loop's own states were where the run goes on; all workers call it."""
        if source.kind == BEGINNING:
            return self.loop_state.beginning
        number = source.position.number
        mine = self.cut.states_at(number) or None
        joins = self._recovery.waiting_to_join  # and may have registered none yet
        if mine is None and source.kind == WORKERS and self.position.number == number and not joins:
            mine = self.loop_state.snapshot()
        everybody: list[Values | None] = all_gather_object(self.world.comm, mine)
        return next((states for states in everybody if states is not None), {})

    def go_back(self, position: Position) -> None:
        """Stand at an earlier step again."""
        if position.phase < self.position.phase:
            # Before this call of `steps` began: what the function did since then would be lost.
            raise RolledBackError(position.number)
        self._journal.load(self.cut.go_back(position))
        self.position = position
        self._tell_steps()
        self._taken_back, self._adopted = True, self._states
        if self.loop_state:
            self.loop_state.load(self._states)
        self._saving.go_back(position.number)
        self.between.drop(position.phase)
        self._leaving.go_back(position.phase)

    def adopt_replica(self, replica: OpenReplica) -> None:
        """Work with this one from now on."""
        self._replica = replica
        self.guard.watch(replica)
        self.parameters = self.cut.survey(replica, self.world)

    def _copy(self) -> None:
        self._journal.settle()
        if self.cut.keeps_copies:
            self.cut.copy(self.position, self.shared_state(), self.replica, anew=True)

    def shared_state(self) -> dict[str, Any]:
        """Return what a worker that joins must know beside the model."""
        return {
            "started_at": self.started_at,
            "workers": self.workers,
            "meta": self._meta,
            "journal": self._journal.state(),
            "states": self.loop_state.snapshot(),
            "between": self.between.state(),
            "before": self._before.state(),
            "data": None if self._begun is None else (DataFacts.of(self._begun[0]), self._begun[1]),
            FROZEN: frozen_names(self.replica.model) if self.replica.whole else None,
        }

    def adopt(self, position: Position, shared: dict[str, Any]) -> None:
        """Go on from where the others stand."""
        self.position = position
        self._tell_steps()
        self.started_at, self._meta = shared["started_at"], shared["meta"]
        self.workers = shared["workers"]
        if shared[FROZEN] is not None:
            freeze_as(self.replica.model, shared[FROZEN])
        self._journal.load(shared["journal"])
        self.between.load(shared["between"])
        self._before.load(shared["before"])
        self._data_of_others, self._adopted = shared["data"], shared["states"]
        self.loop_state.load(shared["states"])

    def _announcement(self, feed: ShardedLoader, epochs: int | None, last: float) -> RunStarted:
        world, options = self.world, self.options
        return RunStarted(
            task=self.name,
            strategy=options.strategy,
            workers=self.workers,
            shards=options.total_shards,
            exactness=str(self.exactness),
            device=str(world.device),
            backend=world.backend,
            parameters=self.parameters,
            samples=feed.samples,
            batch_size=feed.batch_size,
            total_steps=None if math.isinf(last) else int(last),
            epochs=epochs,
            start_step=self.position.number,
            out=str(options.out or ""),
            shards_from=options.shards_from,
            transport=self.transport,
        )

    def evaluate(
        self, data: Any, metrics: MetricsFunction, *, batch_size: int | None = None
    ) -> dict[str, float]:
        """Measure a data set exactly; a metric is a sum and a weight, as in `Task.metrics`. All workers must call it."""
        name = "run.evaluate"
        self._join_to_be_told()
        if self._came_by(name):
            measured: dict[str, float] = self.outcomes.next(self._call, name)
            return measured
        feed = (
            data if isinstance(data, ShardedLoader) else self.feed(data, batch_size=batch_size, shuffle=False)
        )
        self._copy()

        def measure() -> dict[str, float]:
            with self.guard.updating(), self._body.left_out():
                return evaluate(feed, metrics, self.replica, self.world, self.options.seed)

        try:
            measured = self._recovery.together(EVALUATE, measure, called=name)
        finally:
            if feed is not data:
                self._close_feed(feed)
        self._note_between(name, measured)
        for metric in [metric for metric, value in measured.items() if math.isnan(value)]:
            self.emit(
                Note(text=f"the metric {metric} is not a number: its weight is 0, or a batch's value is none")
            )
        return measured

    # Keeping and telling.

    def weights_sha256(self) -> str:
        """Return one number for all weights, wherever they are. All workers must call it, at the same place of the loop.

        They compare their weights, or put them together, and that takes all of them: one that calls it alone, to print the number
        on rank 0 say, is refused. Call it on all and print it on one.
        """
        name = "run.weights_sha256"
        self._join_to_be_told()
        if self._came_by(name):
            told: str = self.outcomes.next(self._call, name)
            return told
        self._recovery.together(
            EVALUATE, lambda: None, called=name
        )  # what saves is waited for ten times as long
        self._recovery.together(SAVE, lambda: self.replica.settle())  # noqa: PLW0108  (the replica of the day)
        if self.replica.whole:
            found = weights_sha256(self.replica.state()["model"])
        else:
            found = self._recovery.together(
                EVALUATE, lambda: sharded_recovery.weights_sha256(self.world, self.replica)
            )
        self._note_between(name, found)
        return found

    def _came_by(self, asked: str) -> bool:
        """Return whether the others came by here before this worker joined them, or the run before it was resumed."""
        if self._catches_up:
            return not self._recovery.waiting_to_join
        return self._inside is None and self.outcomes.holds(self._call, asked)

    @property
    def _call(self) -> int:
        """The call of `steps` that the user's function is in, or behind; -1 before its first."""
        return self._calls - 1

    @property
    def outcomes(self) -> Between:
        """What was found out where the user's function is now, outside of `steps`."""
        return self.between if self._calls else self._before

    def _note_between(self, asked: str, outcome: Any) -> None:
        if self._inside is None and not self._skipped:
            self.outcomes.note(self._call, asked, outcome)

    def _join_to_be_told(self) -> None:
        """Join the others before the first call of `steps`, where they found out what this worker is asked for.

        They may have measured a checkpoint's weights, which this worker cannot make: its machine may not have the files. In a run
        that nothing was saved of, it makes what they measured: the weights of the beginning.
        """
        waits = self._recovery.waiting_to_join and self._replica is not None
        if waits and not self._calls and self.options.resume:
            self._catches_up = True
            self._recovery.begin()
            self.loop_state.resume(self._adopted)
            # What stands from here to the call of `steps` has been done to that state.
            self._aside = PutAside(self.replica, self.loop_state, self._adopted)

    def save(self) -> None:
        """Write a checkpoint of where the run stands. All workers must call it, at the same place of the loop.

        In the body of a step, and in `after_epoch`, it is written when that ends: what the body does behind this belongs to it.
        With --save-async training goes on as soon as the state is copied.
        """
        self._check_whole("run.save() was called")
        if self._inside is None and not (self._recovery.waiting_to_join or self._catches_up or self._skipped):
            if self.outcomes.has_save(self._call):
                self._come_by_save()
                return
            if self._resumed:
                return  # the run is further than this, and what it was saved with must stay
            self.outcomes.note(self._call, SAVE_CALL, None)
        if self._inside is None:
            self.save_due(called=SAVE_CALL)
        else:
            self._saving.ask(SAVE_CALL)

    def _come_by_save(self) -> None:
        """Be where the run was saved between two calls of `steps`, once the function has come there again."""

        def load() -> None:
            self._take_up_again()
            all_gather_object(self.world.comm, None)  # whoever gets further knows that all have the state

        if self.outcomes.holds(self._call, SAVE_CALL):
            self.outcomes.next(self._call, SAVE_CALL)
            if not self.outcomes.has_save(self._call):
                self._recovery.together(SAVE, load)

    def save_due(self, *, last: bool = False, called: str | None = None) -> None:
        """Write a checkpoint: every worker its part, when all have kept theirs of the ledger; the `last` one is waited for."""
        self._journal.settle()
        if self._recovery.waiting_to_join or self._catches_up or self._skipped:
            return  # the run is elsewhere still
        meta = {
            "task": self.name,
            "batch_size": self._meta.get("batch_size"),
            "exactness": str(self.exactness),
            **{key: self.about[key] for key in (HORIZON,) if key in self.about},
            # Of a Task, which has one training set; a loop may go from one set to another.
            **({"stream": self._begun[0].order is None} if self.about and self._begun else {}),
            "samples": self.samples,
        }
        self._saving.save(meta, last=last, called=called)
        self.cut.note_checkpoint(self.position, self._journal)

    def emit(self, event: Event) -> None:
        """Emit to everyone who listens; only rank 0 has listeners."""
        if self._listeners is not None:
            self._listeners.emit(event)

    @property
    def recoveries(self) -> list[dict[str, Any]]:
        """The changes of the group that this run came through, each with the seconds it cost."""
        return self._recovery.recoveries

    @property
    def samples(self) -> int:
        """The samples of the whole run, what came before a resume included."""
        return int(self._meta.get("samples", 0)) + self._journal.samples

    @property
    def transport(self) -> str:
        """What tensors really travel by between the workers of the present group."""
        return THREADS if self.strategy.threaded and self.workers > 1 else self.world.transport

    @property
    def journal(self) -> Journal:
        """What the steps of this process came to."""
        return self._journal

    def close(self) -> None:
        """Let go of data, listeners and the world."""
        self.world.pulse.enter(ENDED)
        for feed in self._feeds:
            feed.close()
        self._saving.close()
        self._records.close()
        if self._listeners is not None:
            self._listeners.close()
        self.world.close()

    def with_options(self, **changes: Any) -> None:
        """Fill in options that only the task knows."""
        self.options = replace(self.options, **changes)
