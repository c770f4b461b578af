"""Finds plain numbers that a loss or a forward pass changes: each worker counts the passes of its own samples.

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
        f"loss() or forward() changes {name} ({before[name]} before this step, {after[name]} after it). It counts the passes of "
        "this worker's own samples, so what is computed from it depends on shards and workers. Use task.steps_done, which "
        "counts optimizer steps, or a buffer with a rule in buffers()."
    )
