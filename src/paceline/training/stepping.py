"""From one step to the next: epochs, the changes of the group between steps, and the checkpoints that fall due."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.data import ShardedLoader, StepData
from paceline.errors import InputError
from paceline.strategies.base import ShardWork, StepWork
from paceline.training.membership import STEP, LeaveRunError
from paceline.training.options import SaveEvery
from paceline.training.recovery import Recovery, RolledBackError
from paceline.training.saving import Saving
from paceline.training.step import Step
from paceline.world import seeds
from paceline.world.fault_points import DATA, hit
from paceline.world.status_page import Kind, Phase

if TYPE_CHECKING:
    from paceline.training.run import Run

READING, COMPUTING = Phase.DATA, Phase.COMPUTE
STEPPING = Kind.STEP


@dataclass(frozen=True, kw_only=True)
class Stepping:
    """The steps of one call of `Run.steps`."""

    run: Run
    recovery: Recovery
    saving: Saving
    feed: ShardedLoader
    max_grad_norm: float | None
    last: float
    epochs: int | None
    due: SaveEvery
    after_epoch: Callable[[int], None] | None

    @property
    def left(self) -> bool:
        """Whether there are steps to take."""
        position = self.run.position
        return (self.epochs is None or position.epoch < self.epochs) and position.number < self.last

    def take(self) -> Iterator[Step]:
        """Return the steps from where the run stands to its end, with the checkpoints and measurements on the way."""
        run, last = self.run, self.last
        while self.left:
            before = run.position
            for step in self._epoch():
                run.seed_loop("step", step.number)
                yield step
                if step.result is None:
                    raise InputError(
                        f"step {step.number} was left without step.apply(), so its batch would be lost. Call apply once a step."
                    )
                step.end()
                run.end_step()
                number = run.position.number
                self.saving.after_body(again=step.again, due=self.due.after_step(number), last=number >= last)
            if run.position.number == last and run.position.step != self.feed.steps_per_epoch:
                break
            if run.position == before and before.step == 0:
                raise InputError(
                    "the training stream gave no sample in a whole epoch. Give one with samples."
                )
            run.end_epoch()
            try:
                if self.after_epoch is not None:
                    run.seed_loop("epoch", run.position.epoch)
                    self.after_epoch(run.position.epoch)
                    run.end_after_epoch()
            except RolledBackError:
                continue
            self.saving.after_body(
                again=False, due=self.due.after_epoch(run.position.epoch), last=run.position.number >= last
            )

    def _epoch(self) -> Iterator[Step]:
        run, feed = self.run, self.feed
        run.journal.start()
        while run.position.number < self.last:
            # Once for each group: whoever is there now has other shards to read.
            generation, pulse = run.world.generation, run.world.pulse
            pulse.begin(STEPPING, run.position.number)
            pulse.enter(READING)
            for data in feed.epoch(run.position.epoch, run.position.step):
                hit(DATA)
                if self.recovery.membership.change_wanted:
                    self.recovery.regroup(STEP)
                if self.recovery.stopping:
                    self.saving.at_the_end()
                    raise LeaveRunError
                if run.world.generation == generation:
                    yield self._step(data)
                if run.world.generation != generation:
                    break
                if run.position.number >= self.last:
                    return
                pulse.begin(STEPPING, run.position.number)
                pulse.enter(READING)
            else:
                return

    def _step(self, data: StepData) -> Step:
        run = self.run
        number, seed = run.position.number, run.options.seed
        run.world.pulse.enter(COMPUTING)
        shards = [
            ShardWork(
                shard.index,
                seeds.derive(seed, "shard", number, shard.index),
                shard.samples,
                shard.batches,
            )
            for shard in data.shards
        ]
        work = StepWork(number, data.size, shards)
        step = Step(
            work,
            run.position.epoch,
            run.replica,
            run.world,
            self.max_grad_norm,
            run.step_applied,
            self.recovery,
            run.guard,
            run.seed_loop,
            run.hidden,
            run.begin_attempt(),
        )
        run.record_step(step)
        return step
