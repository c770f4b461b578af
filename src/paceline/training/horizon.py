"""How many steps a learning-rate schedule is laid out for: fixed when a run begins, and kept in its checkpoints.

A schedule that was laid out anew on resume would jump: one that had come to its end would start over from its peak.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.errors import InputError, PacelineError
from paceline.task import Task

KEY = "horizon"
"""Where a checkpoint's meta data holds it."""


def choose_horizon(planned: int | None, asked: int | None, saved: Mapping[str, Any]) -> int | None:
    """Return the horizon of a run: the one it was begun with, the one asked for, or the whole run's; None if nobody knows."""
    if KEY not in saved:
        return planned if asked is None else asked
    kept: int | None = saved[KEY]
    if asked not in (None, kept):
        raise InputError(
            f"--horizon {asked}: the schedule of this run was laid out for {kept or 'an unknown number of'} steps when it began, "
            "and would jump. Leave --horizon out, or start a new run with it."
        )
    return kept


def is_forgotten(asked: int | None, saved: Mapping[str, Any]) -> bool:
    """Return whether a run is resumed whose checkpoint does not say how long its schedule is, and nobody else does."""
    return bool(saved) and KEY not in saved and asked is None


def refuse_forgotten(planned: int | None) -> NoReturn:
    """Raise for a checkpoint that does not say how many steps its schedule was made for."""
    raise InputError(
        "--resume: this checkpoint does not say how many steps the learning-rate schedule was made for, and with another "
        "number it would jump. Give --horizon N, the number of steps that the run was begun for "
        f"({planned or 'unknown'} by the present options)."
    )


def make_schedule(
    task: Task, optimizer: Optimizer, horizon: int | None, taken: Callable[[], int]
) -> LRScheduler | None:
    """Make a task's schedule; `taken` says how many steps there were, so that it stays at its end when it has come there."""
    try:
        schedule = task.scheduler(optimizer, horizon)
    except PacelineError:
        raise
    except Exception as error:
        if horizon is not None:
            raise
        raise _of_unknown_length("scheduler()", error) from error
    if not callable(getattr(schedule, "step", None)):
        return schedule
    if horizon is None:
        _explain_failure(schedule)
    else:
        _hold_at_end(schedule, horizon, taken)
    return schedule


def _of_unknown_length(what: str, error: Exception) -> InputError:
    return InputError(
        f"{what} failed, and the schedule's total_steps is None, because nobody knows how long this stream is "
        f"({type(error).__name__}: {error}). Give --steps N or --horizon N, or a schedule for None."
    )


def _explain_failure(schedule: Any) -> None:
    """Make a schedule whose step() fails say that its length is unknown: CosineAnnealingLR accepts None at first."""
    step = schedule.step

    @functools.wraps(step)
    def explained(*args: Any, **kwargs: Any) -> None:
        try:
            step(*args, **kwargs)
        except TypeError as error:  # what computing with None raises
            raise _of_unknown_length(f"{type(schedule).__name__}.step()", error) from error

    schedule.step = explained


def _hold_at_end(schedule: Any, horizon: int, taken: Callable[[], int]) -> None:
    """Keep a schedule where it ends: beyond it some raise, some fall below zero and some rise again."""
    step = schedule.step

    @functools.wraps(step)
    def held(*args: Any, **kwargs: Any) -> None:
        if taken() < horizon:
            step(*args, **kwargs)

    schedule.step = held
