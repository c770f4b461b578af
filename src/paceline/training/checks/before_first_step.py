"""What a run refuses before its first step."""

from __future__ import annotations

import math
from difflib import get_close_matches
from typing import Any

from paceline import strategies
from paceline.data import ShardedLoader
from paceline.errors import InputError
from paceline.ranges import CLIP, COUNT, STEPS
from paceline.strategies.base import Exactness
from paceline.strategies.replica import Strategy
from paceline.task import Task
from paceline.training.options import OPTION, TASK, RunOptions


def promise(strategy: Strategy, options: RunOptions) -> Exactness:
    """Return the level this run promises, or refuse to promise more than the strategy can give."""
    order = list(Exactness)
    level = strategy.level(options.tuning)
    # Sums over a whole batch depend on how it is spread, and kernels on how much is compiled at once.
    blocks = options.compile and strategies.entry(options.strategy).compiles_blocks
    spread = options.sync_batchnorm or blocks
    if spread and level is Exactness.BITWISE:
        level = Exactness.NUMERIC
    if options.exact is None:
        return level
    asked = Exactness(options.exact)
    if order.index(asked) < order.index(level):
        raise InputError(
            f"--exact {asked} is more than --strategy {options.strategy} can give, which is {level}. "
            f"Use --exact {level}, or --strategy single."
        )
    return asked


def check_shards(asked: int | None, options: RunOptions) -> None:
    """Refuse other shards than the task asks for where nobody else has said how many: the answer would be another."""
    if options.shards_from == OPTION or options.resume:
        return
    read = options.shards if options.shards_from == TASK else None
    if asked != read:
        raise InputError(
            f"the task says shards = {asked}, but {read} when it was read before the workers started. "
            f"Let it say the same each time, or give --shards {asked or options.total_shards}."
        )


def last_step(loader: ShardedLoader, epochs: int | None, steps: int | None) -> float:
    """Return the number of the step at which the run ends, as far as it is known beforehand."""
    if steps is not None:
        return steps
    if epochs is None:
        raise InputError("the run has no end: give epochs or steps.")
    return math.inf if loader.steps_per_epoch is None else epochs * loader.steps_per_epoch


def check_last_batch(loader: ShardedLoader, options: RunOptions, workers: int) -> None:
    """Refuse a last batch that is too short for statistics over all workers."""
    left = (loader.samples or 0) % loader.batch_size
    if options.sync_batchnorm and 0 < left < workers:
        raise InputError(
            f"--sync-batchnorm needs a sample on each of {workers} workers in every batch, but the last one has only "
            f"{left}. Use another --batch-size."
        )


def check_batch_size(there: int, here: int) -> None:
    """Refuse another size of batch than the run was begun with."""
    if there != here:
        raise InputError(
            f"this run has batches of {there} samples, not of {here}: the result would differ. "
            f"Use --batch-size {there}."
        )


def read_ends(epochs: Any, steps: Any) -> tuple[int | None, int | None]:
    """Return how many epochs and steps a call takes, as whole numbers of Python's own."""
    return (
        None if epochs is None else int(COUNT.read("epochs", epochs)),
        None if steps is None else int(STEPS.read("steps", steps)),
    )


def check_clip(max_grad_norm: float | None) -> None:
    """Raise for a largest norm outside of its range."""
    if max_grad_norm is not None:
        CLIP.read("max_grad_norm", max_grad_norm)


def near_names(task: Task) -> list[str]:
    """Return notes on names of a task's class that are so near to one of `Task` that it may have been meant."""
    known = {name.replace("_", ""): name for name in dir(Task) if not name.startswith("_")}
    written = {
        name
        for kind in type(task).__mro__
        if issubclass(kind, Task) and kind is not Task
        for name in vars(kind)
    }
    notes = []
    for name in sorted(written):
        near = get_close_matches(name.replace("_", "").lower(), known, n=1, cutoff=0.9)
        if near and known[near[0]] != name and not name.startswith("_"):
            notes.append(
                f"paceline does not read {type(task).__name__}.{name}; {known[near[0]]} is what it reads."
            )
    return notes
