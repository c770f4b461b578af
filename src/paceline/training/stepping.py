"""From one step to the next: epochs, the changes of the group between steps, and the checkpoints that fall due."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from paceline.data import ShardedLoader, StepData
from paceline.data.resident import gathered
from paceline.errors import InputError
from paceline.observe import Note
from paceline.recovery.agreement import OpenBody, WentBackError
from paceline.recovery.membership import STEP, LeaveRunError
from paceline.recovery.position import Position
from paceline.strategies.base import ShardWork, StepWork
from paceline.strategies.epoch_schedules import PerEpoch
from paceline.strategies.in_turns.optimizers import each_of
from paceline.training.checks.before_first_step import last_step
from paceline.training.checks.same_stream import TRAINING, read_alike
from paceline.training.core import EngineCore
from paceline.training.group import RunGroup
from paceline.training.options import Every
from paceline.training.saving import Saving
from paceline.training.step import Step
from paceline.training.turns import TurnOrder
from paceline.training.user_loop import schedules
from paceline.world import seeds, spans
from paceline.world.fault_points import DATA, hit
from paceline.world.status_page import OperationKind, Phase

_STEP, _DATA, _COMPUTE = OperationKind.STEP, Phase.DATA, Phase.COMPUTE


@dataclass(frozen=True, kw_only=True)
class StepsCall:
    """What one call of `run.steps` asks for."""

    phase: int
    """Which call it is, from 0."""
    loader: ShardedLoader
    epochs: int | None
    steps: int | None
    max_grad_norm: float | None
    after_epoch: Callable[[int], None] | None
    stops: Callable[[], bool] | None
    """Whether to end where the run stands, alike on all workers; None where nothing ends it early."""
    turns: TurnOrder

    @property
    def last(self) -> float:
        """How many steps it takes, as far as that is known beforehand."""
        return last_step(self.loader, self.epochs, self.steps)


@dataclass(kw_only=True)
class Stepping:
    """The steps of one call of `run.steps`."""

    core: EngineCore
    group: RunGroup
    saving: Saving
    call: StepsCall
    last: float
    epochs: int | None
    _schedules_seen: bool = field(default=False, init=False)
    """Whether schedules of the loop's own were looked for: they are there by the end of the first step."""

    def __post_init__(self) -> None:
        self._sharded = self.core.state.options.total_shards > 1

    @property
    def left(self) -> bool:
        """Whether there are steps to take."""
        position = self.core.state.position
        return (self.epochs is None or position.epoch < self.epochs) and position.number < self.end

    @property
    def end(self) -> float:
        """The step at which the call ends, as far as that is known."""
        if self.call.stops is not None and self.call.stops():
            return self.core.state.position.number
        stop_at = self.core.state.stop_at
        return self.last if stop_at is None else min(self.last, stop_at)

    def take(self) -> Iterator[Step]:
        """Yield the steps from where the run stands to its end, with the checkpoints and measurements on the way."""
        state = self.core.state
        save_every = state.options.save_every
        every = Every.parse(save_every) if save_every else Every()
        profile = self.core.profile
        state.stand_at(state.position)
        while self.left:
            before = state.position
            for step in self._epoch():
                if state.task is None:
                    state.seed_loop("step", step.number)
                yield step
                self._check_in_turn()
                self._end(step)
                if profile.measures:
                    profile.after_step()
                number = state.position.number
                due = every.steps is not None and every.after_step(number)
                self.saving.after_body(again=step.again, due=due, last=number >= self.end)
            if state.position.number >= self.end and state.position.step != self.call.loader.steps_per_epoch:
                break
            if state.position == before and before.step == 0:
                raise InputError(
                    "the training stream gave no sample in a whole epoch. Give one with samples."
                )
            state.position = state.position.next_epoch()
            self.core.journal.end_epoch(state.position)
            try:
                self._end_epoch()
            except WentBackError:
                continue
            position = state.position
            self.saving.after_body(
                again=False, due=every.after_epoch(position.epoch), last=position.number >= self.end
            )
        profile.end()

    def _end_epoch(self) -> None:
        """Do what the loop does between two epochs, and have a schedule go on that counts them."""
        state, number = self.core.state, self.core.state.position.number
        if self.call.after_epoch is not None:
            state.seed_loop("epoch", state.position.epoch)
            self.call.after_epoch(state.position.epoch)
        if isinstance(schedule := state.replica.scheduler, PerEpoch):
            measured = state.measured
            found = measured[1] if measured is not None and measured[0] == number else None
            with state.replica.looks:
                schedule.end_epoch(state.position.epoch, found)
        # One taken inside after_epoch could not be gone back to.
        if self.call.after_epoch is not None and self.core.sharded.due(state.position):
            self.group.take_snapshot()

    def _epoch(self) -> Iterator[Step]:
        state = self.core.state
        self.core.journal.start()
        while state.position.number < self.end:
            # Once for each group: whoever is there now has other shards to read.
            generation, status_page = state.world.generation, state.world.status_page
            status_page.begin(_STEP, state.position.number, _DATA)
            position = state.position
            known = state.epoch_starts.state_at(position)
            coming = read_alike(
                self.call.loader,
                state.world,
                TRAINING,
                position.epoch,
                position.step,
                known,
                tell=lambda text: state.emit(Note(text=text)),
            )
            for data in spans.each(spans.DATA, coming):
                hit(DATA)
                if data.beginning is not None and self._reads_again(data):
                    break
                self._note_state(position, data)
                if not data.size:
                    continue
                if self.core.recovery.membership.change_wanted:
                    self.core.recovery.regroup(STEP)
                if (body := state.broken_body) is not None:  # also where the run has gone back since
                    yield self._make(data, body.number, broken=body)
                    break
                if state.stopping or state.save_asked:
                    self._save_as_asked()
                if state.world.generation == generation:
                    step = self._make(data, state.position.number)
                    # Before any of it can reach others, who may finish it while this one is killed.
                    self.core.records.step(step, state.position)
                    yield step
                if state.world.generation != generation:
                    break
                if state.position.number >= self.end:
                    return
                status_page.begin(_STEP, state.position.number, _DATA)
            else:
                if (body := state.broken_body) is None:
                    return
                empty = StepData(state.position.epoch, state.position.step, 0, ())
                yield self._make(empty, body.number, broken=body)

    def _note_state(self, position: Position, data: StepData) -> None:
        if data.state is None and data.note is None:
            return
        note = self.core.state.epoch_starts.note_state(position, data)
        if note is not None:
            self.core.state.emit(Note(text=note))

    def _save_as_asked(self) -> None:
        """Write the checkpoint that a signal to the launcher asked for; raise where the run ends with it."""
        state = self.core.state
        if state.stopping:
            self.saving.at_the_end()
            raise LeaveRunError
        state.save_asked = False
        self.saving.after_body(again=False, due=True, last=False)

    def _reads_again(self, data: StepData) -> bool:
        """Compare the beginning of a stream's epoch with what it was before; raise where it is another.

        Where the stream may have begun anew it is asked for the beginning a second time; then all of it is read again.
        """
        state, position = self.core.state, self.core.state.position
        starts = state.epoch_starts
        suspected = starts.suspects(position, data)
        if suspected:
            note = starts.confirm(position, data, self.call.loader.beginning_of)
        else:
            note = starts.check(position, data, by_epoch=self.call.loader.is_told_epochs)
        if note is not None and (state.world.size > 1 or state.options.out is not None):
            state.emit(Note(text=note))
        return suspected

    def _make(self, data: StepData, number: int, *, broken: OpenBody | None = None) -> Step:
        """Return a step for the loop's body; one of a `broken` body has no batches, and nothing comes of it."""
        state, seed, replica = self.core.state, self.core.state.options.seed, self.core.state.replica
        if isinstance(replica.scheduler, PerEpoch) and broken is None:
            with replica.looks:
                replica.scheduler.begin_step(data.epoch)
        own_loop = state.task is None
        if replica.turns is not None:
            replica.turns.take(self.call.turns.at(state.position))
        state.world.status_page.enter(_COMPUTE)
        # Rows of a data set that lies on the device; a captured step gathers them itself.
        gathers = replica.graphs is None and state.world.device.type != "cpu"
        shards = [
            ShardWork(
                shard.index,
                seeds.derive(seed, "shard", number, shard.index),
                shard.samples,
                gathered(shard.batches) if gathers else shard.batches,
            )
            for shard in data.shards
        ]
        step = Step(
            StepWork(number, data.size, shards),
            state.position.epoch,
            replica,
            state.world,
            self.call.max_grad_norm,
            self._applied,
            self.core.recovery,
            self.core.loop.guard,
            state.seed_loop if own_loop else None,
            self.core.loop.hidden,
            self.core.loop.begin_attempt(elastic=self.core.recovery.elastic) if own_loop else None,
            broken=broken,
            registered=self.core.loop.registered if own_loop else None,
        )
        if replica.turns is not None:
            step.turn = self.call.turns.at(state.position)
        state.step = step
        self.core.loop.hidden.enter(replica.placement.model, state.task, sharded=self._sharded)
        return step

    def _applied(self, step: Step) -> None:
        """Advance the position, and record a step that has just been applied."""
        state = self.core.state
        state.stand_at(state.position.after_step())
        if step.attempt is not None:
            self.core.loop.body.applied(step.attempt)
        if self.core.loop.hidden.watches or self.core.loop.hidden.remarks:
            for text in self.core.loop.hidden.check(step.number, several=state.world.size > 1):
                state.emit(Note(text=text))
        self.core.changed.after_passes(state.replica.model, state.task)
        if self.saving.saver is not None:
            self.saving.saver.poll()
        self.core.journal.step(step, state.position)
        self.core.recovery.note_step(self.core.journal.state)
        state.world.status_page.end()

    def _check_in_turn(self) -> None:
        """Raise where the loop comes back to this call from a later one, which has moved the run's one position."""
        if self.core.history.call != self.call.phase:
            raise InputError(
                "the loop went on with a call of run.steps (a pass through a prepared loader) in which it was when it began "
                "another one: nested in it, or in a zip of both. A run stands at one place, so steps and epochs of the one would "
                "count for the other, and end it early. Go through one behind the other; for two data sets at once give one of "
                "pairs."
            )

    def _end(self, step: Step) -> None:
        """Note that the loop has done with a step, its own states included."""
        if step.result is None:
            raise InputError(
                f"step {step.number} was left without step.apply(), so its batch would be lost. Call apply once a step. "
                "To accumulate, give the batch of the whole step as batch_size, and micro_batch= for what is computed at a time."
            )
        step.end()
        if step.again:
            self.core.recovery.end_body(step.body)
        else:
            state = self.core.state
            for text in self.core.changed.after_step(state.replica.model, state.task):
                state.emit(Note(text=text))
        if self.core.state.task is None:
            if not self._schedules_seen:
                self._schedules_seen = True
                self._check_schedules()
            self.core.loop.guard.end_step()
        sharded = self.core.sharded
        if sharded.takes_snapshots and sharded.due(self.core.state.position):
            self.group.take_snapshot()

    def _check_schedules(self) -> None:
        """Raise where the loop has a schedule that is lost with the process, and another process may go on with the run."""
        state = self.core.state
        several = state.world.size > 1 and self.core.recovery.elastic
        if state.options.out is not None or several:
            kept = [state.replica.scheduler, *self.core.loop.registered.objects()]
            for optimizer in each_of(state.replica.optimizer):
                schedules.check_kept(optimizer, kept)
