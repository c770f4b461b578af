"""Makes the replica of a run: for its first group, from a checkpoint, and for every group that forms anew."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from paceline import strategies
from paceline.errors import InputError
from paceline.observe import Note
from paceline.state.optimizer_state import drop_groups
from paceline.strategies.base import Exactness, StrategyInputs
from paceline.strategies.buffers.buffers import Rule
from paceline.strategies.compiled import compile_calls
from paceline.strategies.epoch_schedules import OnMetric
from paceline.strategies.guards.schedules import check_parts
from paceline.strategies.in_turns.optimizers import Optimizers
from paceline.strategies.in_turns.outside import own_model
from paceline.strategies.precision import Precision
from paceline.strategies.replica import Replica
from paceline.strategies.structure import Structure
from paceline.training import resuming
from paceline.training.attribute_changes import Then
from paceline.training.checks.same_model import made_alike
from paceline.training.core import EngineCore
from paceline.training.frozen import KEY as FROZEN
from paceline.training.frozen import freeze_as
from paceline.training.hooks import written_by
from paceline.training.several import GivenModel, GivenOptimizer, GivenScheduler
from paceline.training.strategy_inputs import BY_NAME, carried_inputs, new_parts
from paceline.training.user_loop.handle import Handle
from paceline.training.user_loop.schedules import LoopSchedule
from paceline.world import broadcast_object, seeds
from paceline.world.kernels import check_same_kernels, kind_of

NO_BITS = (
    "this strategy promises no bits (statistical): the resumed run is one like the one that was left, but its weights will be "
    "others than if it had not been left."
)


@dataclass(kw_only=True)
class Preparation:
    """What a run's replica is made of."""

    core: EngineCore
    inputs: StrategyInputs | None = field(default=None, init=False)
    _handle: Handle | None = field(default=None, init=False)
    """What a loop of the user's own holds."""
    lacks_groups: bool = field(default=False, init=False)
    """Whether the optimizer of a resumed run has yet to get groups that the function, or the checkpoint, gives it."""
    _changed: Then | None = field(default=None, init=False)
    """What a resumed run had changed beside tensors, until it goes on."""

    def prepare(
        self,
        model: GivenModel,
        optimizer: GivenOptimizer,
        scheduler: GivenScheduler = None,
        buffers: Mapping[str, Rule] | None = None,
        structure: Structure | None = None,
    ) -> tuple[Any, Any]:
        """Place the model for a loop of the user's own, which goes on with these very objects in every group."""
        state = self.core.state
        with seeds.preserved():
            replica = self.prepare_replica(model, optimizer, scheduler, buffers, structure)
        first = next(iter(model.values())) if isinstance(model, Mapping) else model
        if not isinstance(first, nn.Module):
            # A function that makes the model begins at the run's seed, which has served.
            state.seed_loop("call", 0)
        if isinstance(replica.scheduler, OnMetric):
            raise InputError(
                "paceline.OnMetric is for a Task. In a loop give run.prepare the schedule itself, and "
                "call scheduler.step(metric)."
            )
        precision = Precision(state.options.precision, state.world.device)
        if replica.compiler is not None:
            compile_calls(replica.model, replica.compiler, precision)
            precision = Precision("fp32", state.world.device)  # no hooks for it: calls have it now
        self._handle = Handle(replica, precision)
        optimizers = replica.optimizer
        if isinstance(optimizers, Optimizers):
            return replica.model, dict(optimizers.optimizers)
        return own_model(replica.model), optimizers

    def prepare_replica(
        self,
        model: GivenModel,
        optimizer: GivenOptimizer,
        scheduler: GivenScheduler = None,
        buffers: Mapping[str, Rule] | None = None,
        structure: Structure | None = None,
    ) -> Replica:
        """Do the same for a loop that hands the strategy its loss function instead of calling backward."""
        state = self.core.state
        if self.inputs is not None:
            raise InputError(
                "run.prepare was called before, and its model would be trained no more. " + BY_NAME
            )
        device = state.world.device
        self.inputs = inputs = replace(
            new_parts(
                state.options, state.exactness, device, model, optimizer, scheduler, buffers, structure
            ),
            note=lambda text: state.emit(Note(text=text)),
            gradients_seen=state.task is None or bool(written_by(state.task)),
        )
        joins = state.waits_to_join
        # What needs the others is done when there are any.
        inputs = replace(inputs, sync_batchnorm=inputs.sync_batchnorm and not joins)
        exact = state.exactness is Exactness.BITWISE
        check_same_kernels(state.world, kind_of(device, compiled=state.options.compile, exact=exact))
        alike = made_alike(inputs, state.world)
        replica = state.replica_or_none = state.strategy.prepare(alike, state.world)
        self.core.loop.guard.watch(replica)
        state.parameters = self.core.sharded.survey(replica, state.world)
        for text in getattr(replica, "notes", ()):
            state.emit(Note(text=text))
        if state.options.resume and not joins:
            self._resume(replica)
        if state.task is None:
            self.core.loop.body.note_made()
        self.core.sharded.note_checkpoint(state.position, self.core.journal.state)
        return replica

    def prepare_group(self, before: Replica | None) -> Replica:
        """Prepare for the group that has formed, with what the replica of the one before was made of."""
        if self.inputs is None:
            raise RuntimeError("a group is entered when the model is prepared")
        state = self.core.state
        if before is not None and not self.inputs.can_rebuild:
            before.placement.check_reusable()
        inputs = carried_inputs(self.inputs, before) if before is not None else self.inputs
        state.strategy = strategies.load(state.options.choice.strategy(state.world.mesh))
        with seeds.preserved():  # the loop may draw on behind run.evaluate, in which the group broke
            alike = made_alike(inputs, state.world, formed_anew=True)
            replica = state.strategy.prepare(alike, state.world)
        if self._handle is not None:
            self._handle.adopt(replica)
        return replica

    def _resume(self, replica: Replica) -> None:
        """Take over the state of a run that is being resumed."""
        state = self.core.state
        groups = len(replica.optimizer.param_groups)
        saved = resuming.load(replica, state.options, state.world, state.emit)
        self.lacks_groups = drop_groups(replica.optimizer, groups)
        state.position, state.meta = saved.position, saved.meta
        state.epoch_starts.load(saved.position, saved.epoch_start)
        self.core.journal.resume(saved.meta)
        state.started_at = state.position.number
        self.core.history.load_saved(saved.outcomes or [])
        self._changed = saved.changed
        self.freeze()
        self._note_new(self.core.loop.registered.resume(saved.states))
        state.stand_at(state.position)
        self.core.history.resumed = True
        if state.exactness is Exactness.STATISTICAL:
            state.emit(Note(text=NO_BITS))
        self.core.loop.guard.watch(replica)  # its schedule stands elsewhere now

    def resume_again(self) -> None:
        """Be where the run was saved: what stands between the calls that were skipped has been done to that state once more."""
        state = self.core.state
        self.core.history.skipped, self.core.history.resumed, self.lacks_groups = False, False, False
        with self.core.loop.guard.updating():
            saved = resuming.load(state.replica, state.options, state.world, state.emit)
        if saved.position != state.position:
            raise InputError(
                "another process has written to the folder of this run since it was resumed. Give each run its own."
            )
        self.core.loop.registered.resume(saved.states)
        state.meta[FROZEN] = saved.meta.get(FROZEN)
        self.freeze()
        self.set_changed()
        self.core.loop.guard.watch(state.replica)

    def set_changed(self) -> None:
        """Have modules and task be set as they were where the run was saved; all workers call it, where the run goes on."""
        state, then, self._changed = self.core.state, self._changed, None
        if then is None:
            return
        replica, number = state.replica, state.position.number
        for text in self.core.changed.go_on(
            state.world, replica.model, state.task, then, number, computes=replica.placement.computes
        ):
            state.emit(Note(text=text))

    def freeze(self) -> None:
        """Have that train which did where the run was saved: the loop's code may have changed it at a step before."""
        state = self.core.state
        names: list[str] | None = state.meta.get(FROZEN)
        if names is not None and (changed := freeze_as(state.replica.model, names)):
            others = f" (and of {len(changed) - 1} more)" if changed[1:] else ""
            state.emit(
                Note(
                    text=f"requires_grad of {changed[0]}{others} is set to {changed[0] not in names}, as it was where this run "
                    "was saved; a loop that sets it itself in its steps goes on doing so, and has nothing to change."
                )
            )
        if state.training is not None:
            state.meta.pop(FROZEN, None)  # from here on the loop says what trains

    def register(self, name: str, value: Any) -> Any:
        """Save an object's state with the run, and return the object."""
        state = self.core.state
        if state.training is not None:
            raise InputError(f"run.register({name!r}) came after run.steps. Call it before, on every worker.")
        prepared = state.replica_or_none is not None
        known = state.options.resume and prepared and not state.waits_to_join
        if not self.core.loop.registered.register(name, value) and known:
            self._note_new([name])
        return value

    def keep_schedule(self, given: Any, optimizer: Optimizer | dict[str, Optimizer], *, twice: bool) -> Any:
        """Save and hand on a schedule that the loop steps itself, with the run; return it."""
        if twice:
            raise InputError(
                "run.prepare was given two schedules. Give one: scheduler= is stepped by the run after each update, any other by "
                "the loop."
            )
        if isinstance(given, Mapping) or isinstance(optimizer, Mapping):
            raise InputError(
                "a run with several optimizers steps their schedules itself, each with its optimizer: give them by name, as "
                'scheduler={"generator": schedule}. One that the loop is to step is made behind run.prepare, and kept with '
                'run.register("schedule", schedule).'
            )
        made = given if not callable(given) or hasattr(given, "step") else given(optimizer)
        moved = getattr(made, "optimizer", optimizer)
        if moved is not optimizer:
            raise InputError(
                f"the {type(made).__name__} belongs to another optimizer than the one that trains. Make it with it, or give "
                "a function that makes it: run.prepare(model, optimizer, lambda optimizer: ...)."
            )
        check_parts(made)
        self.core.loop.schedule = LoopSchedule(made)
        return self.register("scheduler", made)

    def _note_new(self, names: list[str]) -> None:
        for name in names:
            text = f"the checkpoint has no state {name!r} of the loop: it begins as it is"
            self.core.state.emit(Note(text=text))

    def saved_meta(self) -> dict[str, Any]:
        """Return what the newest checkpoint of a run that is resumed says of it; all workers call it."""
        options, world = self.core.state.options, self.core.state.world
        if not options.resume:
            return {}
        meta = resuming.newest_meta(options) if world.is_first else None
        return broadcast_object(world.comm, meta) or {}
