"""Finds what a loss or a forward pass changes beside tensors: each worker does so for the passes of its own samples.

`self.calls += 1` in a task's loss, for a weight that grows over training, counts batches in a textbook loop and shards
here, and on every worker others. Nothing fails, so the run says it. Such a number may serve a log only: it is no error.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

from torch import nn

from paceline.compat.code_names import names_in
from paceline.strategies.guards.reached import LOOP, Reached
from paceline.task import Task
from paceline.training.checks.carried import tensors_of

_CLOCKS = (time.time, time.perf_counter, time.monotonic, time.process_time)
_DURATION = re.compile(r"(?:^|[._\[])(?:time|elapsed|duration|latency|seconds|secs|ms)(?:$|[_\]])")
"""What measured time is called: of a float alone nobody can tell it from a running mean."""


class Numbers:
    """Watches plain numbers over the passes of one step, those of task, modules and whatever else their code leads to.

    What the first pass makes (a table's length, a scale that is laid out lazily) and what every pass of a step sets alike, by
    task.steps_done say, is not told: compared is from the second pass on. Where a worker has one pass a step, what its second
    step changes is told, unless code there reads task.steps_done.
    """

    def __init__(self, *, settles: bool = True) -> None:
        """`settles`: the first pass may make numbers."""
        self._settles = settles
        self._before: dict[str, object] = {}
        self._passes = 0
        self._began: list[float] = []
        self._sizes: set[object] = set()

    def begin(self, found: Reached) -> None:
        """Record the values before the passes of a step."""
        self._before, self._passes, self._sizes = found.numbers, 0, set()
        self._began = [clock() for clock in _CLOCKS]

    def begin_pass(self, batch: Any, find: Callable[[], Reached]) -> None:
        """Note that a pass is about to begin."""
        self._passes += 1
        for one in tensors_of((batch,)):
            self._sizes.update((*one.shape, one.numel()))
        if self._passes == 2 and self._settles:
            self._before = find().numbers

    def changed(self, found: Reached, *, first: bool) -> dict[str, tuple[object, object]]:
        """Return what passes have changed, `first` those of a process: by its name, the value before and after."""
        if self._passes < 2 and (first or found.reads_steps):
            return {}
        pairs = {
            name: (was, found.numbers[name]) for name, was in self._before.items() if name in found.numbers
        }
        return {
            name: (was, now)
            for name, (was, now) in pairs.items()
            if repr(was) != repr(now) and not _of_loop(name) and not self._harmless(name, was, now)
        }

    def _harmless(self, name: str, was: object, now: object) -> bool:
        """Return whether a number is a size of the batch at hand, or a clock's."""
        if type(now) is not float:
            return was in self._sizes and now in self._sizes
        stamps = zip(self._began, _CLOCKS, strict=True)
        return any(began <= now <= clock() for began, clock in stamps) or bool(_DURATION.search(name))


def _of_loop(name: str) -> bool:
    """Return whether a number is a variable of the loop's, or how long a list of it is: most of those are a log."""
    return name.removeprefix("len(").startswith(LOOP)


def changing(name: str, was: object, now: object, *, task: bool) -> str:
    """Return the note about a number that forward passes change, in a `task` or in a user's own loop."""
    where, steps = ("loss() or forward()", "task.steps_done") if task else ("a pass", "step.number")
    return (
        f"{where} changes the number {name} from pass to pass ({was} before, {now} after). It follows the passes of "
        "this worker's own samples, so what is computed from it depends on shards and workers; in a log it does no harm. "
        f"{steps} counts optimizer steps; other state belongs into a buffer with a rule in buffers()."
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
        if before is None:
            # torch's own modules have no switch but the one for training; looking at all would cost a millisecond.
            named = [(name or "the model", module) for name, module in model.named_modules()]
            written = [pair for pair in named if not type(pair[1]).__module__.startswith("torch.")]
            self._own = [("the task", task), *written]
        words = self._words
        self._words = [
            {
                key: value
                for key, value in vars(owner).items()
                if type(value) in _SWITCHES and not key.startswith("_") and key != "training"
            }
            for _, owner in self._own
        ]
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
                    what = f"{key} of {name} from {was!r} to {is_now!r}"
                    code = getattr(task.on_checkpoint, "__code__", None)
                    if owner is task and code is not None and key in names_in(code):
                        return _committed(what, number)
                    return _switched(what, number)
        return None


_SWITCHES = (bool, str)


def _committed(what: str, number: int) -> str:
    return (
        f"on_checkpoint switched {what} in step {number}. It runs on the one worker that commits a checkpoint, so this differs "
        "between workers: for a log it does no harm; what weights depend on belongs into on_epoch or on_eval, which all call."
    )


def _switched(what: str, number: int) -> str:
    return (
        f"loss() or a hook switched {what} in step {number}. A worker without a sample there does not see that, and a "
        "resumed run only where all workers did: switch it in a hook, or in every call of loss(), by task.steps_done."
    )
