"""Steps a learning-rate schedule, and refuses what torch cannot step: it would fail at a milestone, hours later."""

from __future__ import annotations

import functools
import traceback

import torch
from torch.optim import SGD, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from paceline.errors import InputError, PacelineError


def step_schedule(scheduler: LRScheduler) -> None:
    """Step a schedule; raise in one line where torch's own code fails in it, as it does for a number that is None."""
    try:
        scheduler.step()
    except PacelineError:
        raise
    except Exception as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_filename != lr_scheduler.__file__:
            raise  # the user's own code: its lines are in the traceback
        told = f"{type(error).__name__}: {error}".removesuffix(": ")
        raise InputError(
            f"{type(scheduler).__name__}.step() failed after an optimizer step ({told}). Lay the schedule out for the number of "
            "steps of the whole run, and give all its numbers."
        ) from error


def check_parts(scheduler: object) -> None:
    """Raise for a SequentialLR that torch cannot step past a milestone, now and not when it comes there."""
    if not isinstance(scheduler, lr_scheduler.SequentialLR):
        return
    lists = [value for value in vars(scheduler).values() if isinstance(value, list)]
    parts = next((one for one in lists if one and isinstance(one[0], LRScheduler)), [])
    for part in parts:
        check_parts(part)
    unable = [part for part in parts[1:] if type(part).get_lr is LRScheduler.get_lr]
    if unable and not _can_follow():
        name = type(unable[0]).__name__
        raise InputError(
            f"the SequentialLR goes on to a {name}, which torch {torch.__version__} cannot begin at a milestone "
            "(NotImplementedError). Say the whole schedule in one LambdaLR."
        )


@functools.cache
def _can_follow() -> bool:
    """Return whether this torch's SequentialLR goes on to a schedule that is made of others."""
    optimizer = SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    first, then = (lr_scheduler.ConstantLR(optimizer) for _ in range(2))
    schedule = lr_scheduler.SequentialLR(optimizer, [first, lr_scheduler.ChainedScheduler([then])], [1])
    optimizer.step()
    try:
        schedule.step()
    except NotImplementedError:
        return False
    return True
