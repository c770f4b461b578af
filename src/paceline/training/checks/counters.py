"""Finds what a loss or a forward pass changes beside tensors: each worker does so for the passes of its own samples.

`self.calls += 1` in a task's loss, for a weight that grows over training, counts batches in a textbook loop and shards
here, and on every worker others. Nothing fails, so the run says it. Such a number may serve a log only: it is no error.
"""

from __future__ import annotations

from torch import Tensor, nn

from paceline.task import Task

Numbers = dict[str, object]


def numbers_of(task: Task, model: nn.Module) -> Numbers:
    """Return the plain numbers that the task and the modules have: attributes, of their own or of their class, and settings."""
    owners = [("the task", task), *((name or "the model", module) for name, module in model.named_modules())]
    return {
        f"{path} of {name}": value
        for name, owner in owners
        for held in (*map(vars, reversed(type(owner).__mro__)), vars(owner))
        for key, whole in held.items()
        if not key.startswith("_")
        for path, value in _numbers(key, whole)
    }


def _numbers(key: str, value: object) -> list[tuple[str, object]]:
    """Return a number, or those of a dict or a plain object that holds settings."""
    if type(value) in (int, float):
        return [(key, value)]
    if isinstance(value, nn.Module | Tensor | type) or callable(value):
        return []
    inner = value if isinstance(value, dict) else getattr(value, "__dict__", {})
    return [(f"{key}.{name}", one) for name, one in list(inner.items()) if type(one) in (int, float)]


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
    """Watches which modules train, and the words and switches of task and modules, from the end of one step to the next end."""

    def __init__(self) -> None:
        self._flags: list[bool] | None = None
        self._own: list[tuple[str, Task | nn.Module]] = []
        self._words: list[dict[str, object]] = []
        self._told: set[tuple[str, str]] = set()

    def note_of_change(self, task: Task, model: nn.Module, number: int) -> str | None:
        """Return what to tell where a step, not the first of this process, has switched something."""
        before, self._flags = self._flags, [module.training for module in model.modules()]
        if (
            before is None
        ):  # torch's own modules have no switch but the one for training; looking at all would cost a millisecond
            named = [(name or "the model", module) for name, module in model.named_modules()]
            written = [pair for pair in named if not type(pair[1]).__module__.startswith("torch.")]
            self._own = [("the task", task), *written]
        words, self._words = (
            self._words,
            [
                {
                    key: value
                    for key, value in vars(owner).items()
                    if type(value) in _SWITCHES and not key.startswith("_") and key != "training"
                }
                for _, owner in self._own
            ],
        )
        if before is None or len(before) != len(self._flags):
            return None
        if before != self._flags:
            names = [name or "the model" for name, _ in model.named_modules()]
            name, now = next(
                (name, now) for name, old, now in zip(names, before, self._flags, strict=True) if old != now
            )
            return _switched(f"{name} to {'training' if now else 'evaluation'} mode", number)
        if words == self._words:
            return None
        for (name, owner), old, new in zip(self._own, words, self._words, strict=True):
            for key, is_now in new.items():
                was = old.get(key, getattr(type(owner), key, is_now))
                if was != is_now and (name, key) not in self._told:
                    self._told.add((name, key))
                    return _switched(f"{key} of {name} from {was!r} to {is_now!r}", number)
        return None


_SWITCHES = (bool, str)


def _switched(what: str, number: int) -> str:
    return (
        f"loss() switched {what} in step {number}. A worker without a sample there, one that joins later and a resumed run do "
        "not see that: switch it in every call of loss(), by task.steps_done."
    )
