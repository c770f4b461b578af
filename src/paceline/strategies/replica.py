"""One worker's model, optimizer and schedule: a step, an evaluation and the state, written once for every strategy.

What strategies do differently they give as objects: a `Placement` (which part of which tensor lives here), a `Reducer` (how
gradients add up over the workers), a `Schedule` (the order of the passes) and, where weights are
updated elsewhere, an `Update`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.compat.optim import ensure_hooks, overflows
from paceline.data import to_device
from paceline.errors import InputError, NonFiniteLossError
from paceline.state.chunks import Catalogue, ChunkBounds, LocalState, Read, split
from paceline.state.optimizer_state import check_own_entries, plain
from paceline.strategies import gradients
from paceline.strategies.base import (
    Exactness,
    LossFunction,
    MetricsFunction,
    Rows,
    ShardWork,
    StepWork,
    StrategyInputs,
)
from paceline.strategies.closure_step import ClosureStep
from paceline.strategies.fused_update import FusedUpdate
from paceline.strategies.graphs.step_graphs import StepGraphs
from paceline.strategies.guards.looks import Looks, NoLooks
from paceline.strategies.guards.loss_checks import check_trainable
from paceline.strategies.guards.overlaps import refuse_overlaps
from paceline.strategies.guards.partial_update import keeps_no_gradient, watch_updates
from paceline.strategies.guards.schedules import step_schedule
from paceline.strategies.guards.trained import agree_on_change, check_held
from paceline.strategies.guards.used_options import UsedOptions
from paceline.strategies.in_turns.optimizers import Optimizers, TurnPart, each_of
from paceline.strategies.in_turns.turns import ReplicaTurns
from paceline.strategies.memory.recompute import recompute_blocks
from paceline.strategies.placement import Placement
from paceline.strategies.reducer import Reducer
from paceline.strategies.result import StepResult
from paceline.strategies.schedule import Schedule
from paceline.strategies.step_state import StepState
from paceline.strategies.tuning import Tuning
from paceline.task import Loss
from paceline.world import World, seeds, spans
from paceline.world.fault_points import FORWARD, OPTIMIZER, hit


class Update(Protocol):
    """Applies a step whose optimizer runs elsewhere, on a server."""

    def apply(self, replica: Replica, max_grad_norm: float | None) -> StepResult:
        """Have the step applied, and return what it came to."""


class Replica:
    """A model, its optimizer and its schedule, placed and wired up by a strategy."""

    def __init__(
        self,
        inputs: StrategyInputs,
        world: World,
        placement: Placement,
        reducer: Reducer | None = None,
        schedule: Schedule | None = None,
        update: Update | None = None,
    ) -> None:
        """`world` is everybody who holds a part of the state."""
        self.world, self.placement = world, placement
        bitwise = inputs.exactness is Exactness.BITWISE
        self.reducer = Reducer(world, divides_early=not bitwise) if reducer is None else reducer
        self.schedule = Schedule() if schedule is None else schedule
        self.update = update
        check_trainable([one for one in self.model.parameters() if one.requires_grad])
        if not placement.whole:
            refuse_overlaps(self.model)  # those that cut a model have looked before
        recompute_blocks(self.model, inputs.structure, inputs.tuning)
        self.compiler = inputs.compiler(world)
        self.optimizer: Optimizer = inputs.optimizer(self.model)
        ensure_hooks(self.optimizer)
        self.closure = ClosureStep.of(self.optimizer, placement, updates_here=update is None)
        """What takes the steps of an optimizer that computes the loss itself."""
        if not (inputs.gradients_seen or isinstance(self.optimizer, Optimizers)):
            self.reducer.may_be_kept = lambda: not keeps_no_gradient(self.optimizer)  # type: ignore[method-assign]
        self.fused = FusedUpdate(self.optimizer, world.device, inputs.note)
        check_own_entries(self.optimizer, kept=placement.adapts)
        self.turns = ReplicaTurns(self, self.optimizer) if isinstance(self.optimizer, Optimizers) else None
        """Whose turn it is, where several optimizers take turns."""
        self.partial_update = watch_updates(each_of(self.optimizer), placement.scope, world.device)
        self.options_used = UsedOptions() if placement.compares_options else None
        """What this worker has updated its part of the weights with."""
        self.scheduler: LRScheduler | None = None
        self.looks: Looks = NoLooks(self) if self.partial_update.watches else Looks(self)
        """What the schedule is stepped in."""
        with self.looks if placement.cut_first else nullcontext():
            self.scheduler = inputs.scheduler(self.optimizer)
        self.precision = inputs.precision
        self.scaler: torch.amp.GradScaler | None = inputs.scaler or inputs.precision.scaler()
        placement.adopt(self.optimizer)
        self._buffer_rules, self._shards, self._tuning = inputs.buffer_rules, inputs.shards, inputs.tuning
        self._is_summed = False
        # Most placements have nothing to do there, and are not asked in every step.
        self._refreshes = type(placement).refresh is not Placement.refresh
        self._updates_itself = type(placement).update is not Placement.update
        self._seed_shard: Callable[[int], None] = seeds.seed_everything
        self.graphs: StepGraphs | None = None
        self.take_hold()
        capturable = self.reducer.capturable and self.turns is None
        if inputs.cuda_graph != "off" and world.device.type == "cuda" and capturable:
            self.graphs = StepGraphs(self, inputs)
        self.unsound_option = ""
        """An option of the optimizer's that was no finite number when a step was taken, and in which step; for a message."""
        self.has_updated = False
        """Whether the step in flight has begun to change what the optimizer keeps."""

    def take_hold(self) -> None:
        """Make step state and buffers for the parameters that are placed here: at first, and after each new placement."""
        if self.turns is not None:
            self.turns.restart()
        self.step_state: StepState = self.make_step_state()
        self.make_buffers()
        self.reducer.wire(self.step_state)
        self.has_updated = True

    def make_step_state(self, mine: TurnPart | None = None) -> StepState:
        """Return what a step works on, for all that trains or for the part of a turn."""
        made = StepState(
            self.model,
            self.optimizer,
            self.placement.part,
            self.placement.parameters(),
            self._tuning,
            self._shards,
            self.world.device,
            watched=self.reducer.watches,
            mine=mine,
        )
        made.scaler = self.scaler
        return made

    @property
    def model(self) -> nn.Module:
        """The user's own module, bare, as it is saved."""
        return self.placement.model

    @model.setter
    def model(self, model: nn.Module) -> None:
        """Work with the modules that a loop holds: they have become the ones that were made for this group."""
        self.placement.model = model

    @property
    def whole(self) -> bool:
        """Whether this worker holds all of the state; else it is sharded among the workers."""
        return self.placement.whole

    @property
    def notes(self) -> list[str]:
        """What a user should know of how the model was placed."""
        return list(self.placement.notes)

    def compiled(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        """Return a loss function compiled together with the model that it calls, where the run compiles."""
        return loss if self.compiler is None else self.compiler.of(loss)

    # One step, as the loop of a Task takes it.

    def step(self, work: StepWork, loss: LossFunction, max_grad_norm: float | None) -> StepResult:
        """Compute one optimizer step over one exact global batch."""
        self.has_updated = False
        if self.closure is not None:
            return self._step_with_closure(self.closure, work, loss, max_grad_norm)
        if self.graphs is not None:
            return self._update(self.graphs.step(work, loss, max_grad_norm))
        self.schedule.train(self, work, loss)
        return self.apply(max_grad_norm)

    def _step_with_closure(
        self, closure: ClosureStep, work: StepWork, loss: LossFunction, max_grad_norm: float | None
    ) -> StepResult:
        def evaluate() -> StepResult:
            self.buffers.put_back()  # what the last evaluation leaves is the step's
            return self.computed(work, loss, None)

        hit(OPTIMIZER)
        result = closure.take(evaluate, max_grad_norm)
        self._optimize(steps=False)
        return result

    def computed(self, work: StepWork, loss: LossFunction, max_grad_norm: float | None) -> StepResult:
        """Compute a step up to its update: `.grad` holds what the optimizer takes."""
        self.schedule.train(self, work, loss)
        return self.reduced(max_grad_norm)

    # The same step piece by piece, for a loop of the user's own.

    def begin(self, work: StepWork) -> None:
        """Start a step of which the loop takes the passes itself."""
        if self.schedule.whole_step_only is not None:
            raise InputError(self.schedule.whole_step_only)
        if self.closure is not None:
            self.closure.refuse_pieces()
        self.has_updated = False
        self.open_step(work)

    def open_step(self, work: StepWork) -> None:
        """Start a step with no gradients, wired up for what trains now."""
        self.look(work)
        self.step_state.begin(work)
        self.buffers.begin()
        self.reducer.begin(work)

    def look(self, work: StepWork) -> bool:
        """Look at what may have changed since the last step; return whether what trains has, and was wired up anew."""
        self._is_summed = False
        self.placement.wired.check()
        if self._refreshes:
            self.placement.refresh()
        # Where this worker computes nothing, those that do refuse it, before they bring anything.
        if self.partial_update.watches and self.placement.computes:
            self.partial_update.check()
        self.step_state.trained.check_hooks(self.placement.ignores_hooks)
        if self.step_state.trained.changed:
            self._rewire(work)
            return True
        return False

    def shard(self, work: ShardWork) -> Iterator[Any]:
        """Return the batches of one shard, on the device, with its random streams set."""
        self.step_state.open = work.index
        buffers = self.buffers
        if work.batches:
            versions = buffers.open_shard(self.placement.model) if buffers.active else {}
            self._seed_shard(work.seed)
            for batch in work.batches:
                hit(FORWARD)
                self.world.status_page.batch()
                with spans.of[spans.DATA]:
                    placed = self.placed(batch)
                with spans.of[spans.FORWARD]:  # the loss is computed by whoever takes the batch
                    if self.schedule.open_batch is not None:
                        self.schedule.open_batch()
                    self.step_state.given += 1
                    yield placed
            if buffers.active:
                buffers.close_shard(work.index, self.placement.model, versions)
        with spans.of[spans.REDUCTION]:
            self.reducer.close_shard(work.index)

    def backward(self, loss: Loss) -> None:
        """Add one batch's gradients; the last one of the step sets off the combination with other workers."""
        with spans.of[spans.BACKWARD]:
            self.step_state.enter(loss)
            self.reducer.backward(loss)

    def combine(self) -> None:
        """Make `.grad` hold the sum over the global batch, for reducers whose sums appear there; else `apply` does so."""
        self.reducer.end_batches()
        if not self._is_summed and self.reducer.shows_sums:
            self._finish()

    def _finish(self) -> None:
        self._is_summed = True
        with spans.of[spans.REDUCTION]:
            self.reducer.finish()

    def apply(self, max_grad_norm: float | None) -> StepResult:
        """Combine, normalise, clip, update."""
        if self.update is not None:
            self.has_updated = True
            return self.update.apply(self, max_grad_norm)
        return self._update(self.reduced(max_grad_norm))

    def reduced(self, max_grad_norm: float | None) -> StepResult:
        """Combine, normalise and clip: `.grad` holds what the optimizer takes."""
        self.step_state.check_unchanged()
        if not self._is_summed:
            self._finish()
        result = self.reducer.result()
        if result is None:
            raise InputError(
                f"step {self.step_state.work.number}: step.backward was never called, so there is nothing to apply."
            )
        result.scaled = self.scaler is not None
        with spans.of[spans.OPTIMIZER]:
            try:
                self._normalise(result, max_grad_norm)
            except NonFiniteLossError:
                self.reducer.refused(result)
                raise
        return result

    def _update(self, result: StepResult) -> StepResult:
        with spans.of[spans.OPTIMIZER]:
            hit(OPTIMIZER)
            if self._updates_itself:
                self.placement.update(self._optimize, result)
            else:
                self._optimize()
        return result

    @contextmanager
    def seeding_shards(self, seed: Callable[[int], None]) -> Iterator[None]:
        """Have the random streams of shards set otherwise, for the duration of the context."""
        self._seed_shard = seed
        try:
            yield
        finally:
            self._seed_shard = seeds.seed_everything

    def _normalise(self, result: StepResult, max_grad_norm: float | None) -> None:
        """Turn summed gradients into those of the optimizer: over the weight of the batch, clipped by the true norm."""
        # On a GPU the loop asks one step later, so that it need not wait for the question.
        asks = result.on_cpu
        if asks:
            result.check()
        if self.buffers.watched:
            with spans.of[spans.REDUCTION]:
                self.reducer.combine_buffers(self.buffers)
        factor = self.reducer.factor(result)
        if self.step_state.auxiliary.names:
            self.step_state.auxiliary.merge(self.step_state.work.size, factor)
            factor = 1.0
        if self.turns is not None:
            self.turns.drop(self.step_state.work.number)
        if self.scaler is not None:
            self.reducer.unscale(self.scaler, self.optimizer)
        held = [one.grad for one in self.step_state.parameters if one.grad is not None]
        norm = self.reducer.norm(held, wanted=max_grad_norm is not None)
        if norm is not None and max_grad_norm is not None:
            result.norm = norm * factor
            factor = gradients.clipped(result.norm, factor, max_grad_norm)
            if asks:
                result.check_norm()
        result.applied_factor = factor
        gradients.scale([one.values() if one.is_sparse else one for one in held], factor)

    def _optimize(self, *, steps: bool = True, schedules: bool = True) -> None:
        """Update the weights, then have the schedule go on; or one of the two."""
        if self.partial_update.watches:
            self.partial_update.check()
        if steps and self.options_used is not None:
            self.options_used.note(self.optimizer)
        self.has_updated = True
        overflowed = False
        if steps and self.scaler is None:
            self.fused.step(static=self.graphs is not None and self.graphs.replaying)
        elif steps and self.scaler is not None:
            flags = overflows(self.scaler, self.optimizer)
            with self.fused.swapped():
                self.scaler.step(self.optimizer)
            self.scaler.update()
            # Then no update was made, so the schedule waits too. Where there is none nobody need wait for a GPU to know.
            overflowed = self.scheduler is not None and any(float(flag) for flag in flags)
        if not schedules:
            return
        if not overflowed:
            self.step_schedule()
        if self.buffers.watched:
            self.buffers.end_step()

    def step_schedule(self) -> None:
        """Step the schedule, where there is one, behind an update."""
        if self.scheduler is not None:
            with self.looks:
                step_schedule(self.scheduler)

    def placed(self, batch: Any) -> Any:
        """Return a batch on the device; from pinned memory the copy does not keep this process waiting."""
        device = self.step_state.device
        return to_device(batch, device, non_blocking=device.type == "cuda")

    # What trains may change between two steps.

    def _rewire(self, work: StepWork) -> None:
        """Take up what has begun or ceased to train since the last step, or refuse to go on without it."""
        trained = self.step_state.trained
        if not self.placement.adapts:
            trained.check("this strategy")
        agree_on_change(self.reducer.world, work.number, trained)
        check_held(self.model, self.optimizer)
        for parameter in self.model.parameters():
            parameter.grad = None  # of the step before: nobody else takes it from what has ceased to train
        self.step_state.rewire()
        self.make_buffers()
        self.reducer.wire(self.step_state)
        trained.renew()
        if self.graphs is not None:
            self.graphs.drop()

    def make_buffers(self) -> None:
        """Have what takes the buffers through a step know nothing of them yet."""
        self.buffers = self.placement.make_buffers(self._buffer_rules, self._shards)

    # Evaluation and state.

    def evaluate(self, works: Iterable[StepWork], metrics: MetricsFunction) -> Rows:
        """Measure this worker's shards without touching gradients, buffers or random streams."""
        self.reducer.give_up_sums()
        with self.placement.measuring():
            return self.schedule.measure(self, works, metrics)

    def synchronize(self) -> None:
        """Bring all workers to one state, or refuse where they have parted: before a checkpoint, all together."""
        if self.options_used is not None:
            self.options_used.check(self.world)
        self.placement.synchronize()

    def local_state(self) -> LocalState:
        """Return what this worker holds of the state, without asking anybody."""
        self.placement.wired.check()
        held = self.placement.local_state()
        return replace(
            held,
            extra_state={
                **held.extra_state,
                "scheduler": None if self.scheduler is None else plain(self.scheduler.state_dict()),
                "scaler": None if self.scaler is None else plain(self.scaler.state_dict()),
            },
        )

    def wanted(self, catalogue: Catalogue) -> dict[str, ChunkBounds]:
        """Return which part of each tensor `load_local_state` will read, by key."""
        return self.placement.wanted(catalogue)

    def load_local_state(self, catalogue: Catalogue, read: Read, extra_state: Mapping[str, Any]) -> None:
        """Take over this worker's part of a state of which all tensors are known and can be read in parts."""
        extra_state = copy.deepcopy(extra_state)  # whoever gave it may give it again
        self.placement.load_local_state(catalogue, read, extra_state)
        self.fused.forget()
        if self.scheduler is not None and extra_state["scheduler"] is not None:
            self.scheduler.load_state_dict(extra_state["scheduler"])
        if self.scaler is not None and extra_state["scaler"] is not None:
            self.scaler.load_state_dict(extra_state["scaler"])

    def state(self) -> dict[str, Any]:
        """Return everything by name, whole, independent of the strategy; where it is sharded all workers ask together."""
        self.placement.align()
        return self.placement.gathered(self.local_state(), self.world)

    def load(self, state: dict[str, Any]) -> None:
        """Take over a whole state, of this or another strategy."""
        held = split(state)
        metas = {key: chunk.meta for key, chunk in held.chunks.items()}
        self.load_local_state(metas, lambda key, bounds: bounds.of(held.chunks[key].values), held.extra_state)

    def buffers_put_back(self) -> list[Tensor]:
        """Return the buffers of which `abandon` undoes whatever was done to them in the step."""
        return self.buffers.known()

    def changing_buffers(self) -> list[Tensor]:
        """Return the buffers that passes change; all of them until a first step has shown which."""
        names = self.buffers.names
        return [one for name, one in self.model.named_buffers() if names is None or name in names]

    def abandon(self) -> None:
        """Forget the step in flight, as if it had not begun, and release the group: it is broken.

        Weights change only once every sum has arrived; buffers are put back.
        """
        self.buffers.put_back()
        self.step_state.forget()
        self.placement.abandon()
        self.reducer.abandon()
        self.schedule.abandon()


class Strategy(Protocol):
    """A name, a promise, and a way to prepare.

    A strategy owns neither launching nor files. It turns the inputs of a task into a `Replica`, and the loop only ever talks to
    that, so no loop branches by strategy.
    """

    name: str
    exactness: Exactness
    threaded: bool
    """Whether --workers counts threads of one process instead of processes."""

    def level(self, tuning: Tuning) -> Exactness:
        """Return the level that it can promise with this tuning: its own, or less."""

    def prepare(self, inputs: StrategyInputs, world: World) -> Replica:
        """Place the model and wire up its gradients."""
