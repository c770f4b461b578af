"""Where a run stands and what it is: the one record that the parts of its engine share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from paceline.data import ShardedLoader
from paceline.declared import Average
from paceline.errors import InputError
from paceline.recovery.group_state import GroupState
from paceline.recovery.position import Position
from paceline.strategies.base import Exactness
from paceline.task import Task
from paceline.training.checks.epoch_starts import EpochStarts
from paceline.training.options import RunOptions
from paceline.training.recorder import DataFacts
from paceline.training.step import Step
from paceline.world import seeds


@dataclass(kw_only=True)
class RunState(GroupState):
    """A run on one worker, at this moment."""

    options: RunOptions
    exactness: Exactness
    name: str = "run"
    task: Task | None = None
    """The task that is trained, where it is not a loop of the user's own; it is told how far the run is."""
    about: dict[str, Any] = field(default_factory=dict)
    """What the loop says of itself, for the receipt."""
    meta: dict[str, Any] = field(default_factory=dict)
    """What a checkpoint says of the run."""
    started_at: int = 0
    """The step this process started from: above 0 in a resumed run."""
    training: tuple[ShardedLoader, float | None] | None = None
    """The data that the last call of `steps` goes through, and its largest norm; None before the first."""
    others_training: tuple[DataFacts, float | None] | None = None
    """The same of the others, for a worker that has joined them before its first call of `steps`."""
    epoch_starts: EpochStarts = field(default_factory=EpochStarts)
    """What the last epochs of a stream began with."""
    step: Step | None = None
    """The one that was given last."""
    average: Average | None = None
    """What a Task averages, for its evaluations."""
    ended: bool = False
    """Whether the steps have all been taken."""
    stop_at: int | None = None
    """How many steps will have been taken where the loop has ended its call of `steps` by run.stop(); alike on all workers."""
    measured: tuple[int, dict[str, float]] | None = None
    """The steps taken when a Task was last evaluated, and its metrics; alike on all workers, or only some would ask again."""

    @property
    def repeatable(self) -> bool:
        """Whether what is done outside of the steps can be done once more: a Task's trainer changes nothing there."""
        return self.task is not None

    @property
    def present_workers(self) -> int:
        """How many there are now, on all machines; servers are not counted."""
        world = self.world
        return self.options.workers if self.strategy.threaded else world.size - world.mesh.servers

    @property
    def in_training(self) -> bool:
        """Whether steps have been asked for and not all were taken."""
        return self.training is not None and not self.ended

    def stand_at(self, position: Position) -> None:
        """Stand at a step, and tell the task how many were taken."""
        self.position = position
        if self.task is not None:
            self.task.steps_done = position.number

    @property
    def left_open(self) -> bool:
        """Whether the last step has gone through a model with buffers and was not applied."""
        return (
            self.step is not None
            and self.step.left_open
            and next(self.replica.model.buffers(), None) is not None
        )

    def check_whole(self, what: str) -> None:
        """Raise in the middle of a step: a state of there is that of no step."""
        if self.left_open:
            raise InputError(
                f"{what} in the middle of step {self.position.number}, before step.apply(), and forward may have changed the "
                "model's buffers by then. Do it after step.apply()."
            )

    def check_between(self, called: str) -> None:
        """Raise where the loop calls for all workers in the middle of a step: others may be in a pass that needs this one."""
        self.check_whole(f"{called}() was called")
        if self.open_call is not None and self.step is not None and self.step.left_open:
            raise InputError(
                f"{called}() was called in the middle of step {self.position.number}, before step.apply(): each worker has gone "
                "through other batches by then, so there is no one state to look at. Call it after step.apply(), or before "
                "`for batch in step`."
            )

    def seed_loop(self, *place: int | str) -> None:
        """Seed what a loop of the user's own draws outside of its batches, by its place in the run: alike on every worker.

        A Task's trainer draws nothing there.
        """
        if self.task is None:
            seeds.seed_everything(seeds.derive(self.options.seed, "loop", *place))

    def seed_update(self) -> None:
        """Seed what an update draws, noise on gradients say, alike on every worker that is to come to the same weights."""
        if self.exactness is not Exactness.STATISTICAL:
            seeds.seed_everything(seeds.derive(self.options.seed, "update", self.position.number))
