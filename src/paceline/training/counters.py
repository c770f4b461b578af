"""Finds what a loss or a forward pass changes beside tensors: each worker does so for the passes of its own samples.

`self.calls += 1` in a task's loss, for a weight that grows over training, counts batches in a textbook loop and shards
here, and on every worker others. Nothing fails, so the run says it. Such a number may serve a log only: it is no error.
"""

from __future__ import annotations

from torch import nn

from paceline.task import Task

Numbers = dict[str, object]


def numbers_of(task: Task, model: nn.Module) -> Numbers:
    """Return the plain numbers that the task and the modules have as attributes, of their own or of their class."""
    owners = [("the task", task), *((name or "the model", module) for name, module in model.named_modules())]
    return {
        f"{key} of {name}": value
        for name, owner in owners
        for held in (*map(vars, reversed(type(owner).__mro__)), vars(owner))
        for key, value in held.items()
        if not key.startswith("_") and type(value) in (int, float)
    }


def note_of_changes(before: Numbers, after: Numbers) -> str | None:
    """Return what to tell about numbers that one step has changed; None where it has changed none."""
    changed = [name for name, value in after.items() if repr(before.get(name, value)) != repr(value)]
    if not changed:
        return None
    name = changed[0]
    return (
        f"loss() or forward() changes {name} ({before[name]} before this step, {after[name]} after it). It follows the passes of "
        "this worker's own samples, so what is computed from it depends on shards and workers; in a log it does no harm. "
        "task.steps_done counts optimizer steps; other state belongs into a buffer with a rule in buffers()."
    )


class Modes:
    """Watches which modules train and which evaluate, from the end of one step to the end of the next."""

    def __init__(self) -> None:
        self._flags: list[bool] | None = None

    def note_of_change(self, model: nn.Module, number: int) -> str | None:
        """Return what to tell where a step, not the first of this process, has switched the mode of a module."""
        before, self._flags = self._flags, [module.training for module in model.modules()]
        if before is None or before == self._flags or len(before) != len(self._flags):
            return None
        names = [name or "the model" for name, _ in model.named_modules()]
        name, now = next(
            (name, now) for name, old, now in zip(names, before, self._flags, strict=True) if old != now
        )
        return (
            f"loss() switched {name} to {'training' if now else 'evaluation'} mode in step {number}. A worker without a sample "
            "there, one that joins later and a resumed run do not see that: switch it in every call of loss(), by "
            "task.steps_done."
        )
