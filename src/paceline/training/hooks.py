"""The hooks of a Task: called on every worker alike, with numbers, and nothing of what they do may reach the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from paceline.declared import CheckpointInfo, EpochInfo, EvalInfo, StepInfo
from paceline.errors import InputError
from paceline.state.optimizer_state import options_of, same_options
from paceline.strategies.replica import Replica
from paceline.strategies.result import StepResult
from paceline.task import Task
from paceline.training.checks.declared_values import DeclaredValues
from paceline.training.state import RunState
from paceline.training.user_loop.attempt import checksums
from paceline.training.user_loop.marks import ModuleMarks
from paceline.training.user_loop.stand_in import hiding, in_parts
from paceline.world import seeds

STEP, EPOCH, EVAL, CHECKPOINT = "on_step", "on_epoch", "on_eval", "on_checkpoint"


def written_by(task: Task) -> frozenset[str]:
    """Return the hooks that a task has of its own, on its class or on the instance."""
    names = (STEP, EPOCH, EVAL, CHECKPOINT)
    return frozenset(
        name for name in names if getattr(getattr(task, name), "__func__", None) is not getattr(Task, name)
    )


class Hooks:
    """Those that a task has written; the others cost nothing."""

    def __init__(self, task: Task, state: RunState, declared: DeclaredValues) -> None:
        self._task, self._state, self._declared = task, state, declared
        self.written = written_by(task)
        self._marked: tuple[Replica, ModuleMarks] | None = None
        self._calls = 0

    def step(self, result: StepResult, learning_rate: float | Tensor) -> None:
        """Call on_step, which the task has written; on a GPU this waits for the numbers of the step."""
        position = self._state.position
        info = StepInfo(
            number=position.number,
            epoch=position.epoch,
            loss=result.loss,
            samples=result.size,
            learning_rate=float(learning_rate),
            gradient_norm=None if result.norm is None else float(result.norm),
        )
        with hiding(in_parts(self._state.replica.placement)):
            self._call(self._task.on_step, info)

    def epoch(self, epoch: int, metrics: Mapping[str, float]) -> None:
        """Call on_epoch for an epoch that is over."""
        if EPOCH in self.written:
            number = self._state.position.number
            self._call(self._task.on_epoch, EpochInfo(epoch=epoch, step=number, metrics=dict(metrics)))

    def evaluation(self, info: EvalInfo) -> None:
        """Call on_eval."""
        if EVAL in self.written:
            self._call(self._task.on_eval, info)

    def checkpoint(self, step: int, path: str) -> None:
        """Call on_checkpoint, on the worker that has committed it."""
        if CHECKPOINT in self.written:
            with seeds.preserved():
                self._task.on_checkpoint(CheckpointInfo(step=step, path=path))

    def _call(self, hook: Callable[[Any], None], info: Any) -> None:
        """Call a hook with random streams of its own; raise where it has changed what is trained."""
        state, name = self._state, hook.__name__
        self._calls += 1
        looks = self._calls & (self._calls - 1) == 0
        marks = self._marks()
        before, options = marks.note(), options_of(state.replica.optimizer)
        values = checksums(state.replica) if looks else None  # torch does not count what goes through .data
        with seeds.preserved():
            seeds.seed_everything(seeds.derive(state.options.seed, "hook", name, state.position.number))
            hook(info)
        self._declared.check()
        # Of tensors alone: a layer without any may take the place of another.
        written = not before.hold(marks.note().tensors)
        written = written or (values is not None and values != checksums(state.replica))
        if written or not same_options(options, options_of(state.replica.optimizer)):
            what = "weights or buffers of the model" if written else "options of the optimizer"
            raise InputError(
                f"{type(self._task).__name__}.{name} changed {what}, and a worker that missed the end of a step would do so a "
                "second time. A hook may read them; scheduler() sets learning rates."
            )

    def _marks(self) -> ModuleMarks:
        replica = self._state.replica
        if self._marked is None or self._marked[0] is not replica:
            self._marked = replica, ModuleMarks(replica.model)
        return self._marked[1]
