"""Finds a schedule that the loop steps itself and that no checkpoint holds: a resumed run would begin it anew, in silence."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any
from weakref import WeakSet

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.errors import InputError

DEPTH = 4
_made: WeakSet[LRScheduler] = WeakSet()
"""Those that were made by what `run.prepare` was given: one of a group that came to nothing may be there for a while."""


def noted(make: Callable[[Optimizer], LRScheduler | None]) -> Callable[[Optimizer], LRScheduler | None]:
    """Return what makes a schedule, and has it known as one that is kept."""

    def made(optimizer: Optimizer) -> LRScheduler | None:
        schedule = make(optimizer)
        with suppress(TypeError):  # None, or an object of the user's own that cannot be referred to weakly
            _made.add(schedule)  # type: ignore[arg-type]
        return schedule

    return made


class LoopSchedule:
    """A schedule that the loop steps itself."""

    def __init__(self, schedule: Any) -> None:
        self._schedule, self._began_at = schedule, getattr(schedule, "last_epoch", None)
        self._looked = False

    def note(self) -> str | None:
        """Return a line for the user, once, where the loop has come to the end of its steps and never stepped it."""
        looked, self._looked = self._looked, True
        if looked or self._began_at is None or getattr(self._schedule, "last_epoch", None) != self._began_at:
            return None
        return (
            f"the {type(self._schedule).__name__} that run.prepare returned was never stepped, so the learning rate stayed the "
            "same. Call its step() after each step or epoch, or give it as scheduler= and the run steps it after each update."
        )


def check_kept(optimizer: Optimizer, kept: Iterable[Any]) -> None:
    """Raise where a schedule of this optimizer is not among those that are saved and handed on."""
    known = {id(one) for one in _with_parts([*kept, *_made])}
    for found in _schedules_of(optimizer):
        if id(found) not in known:
            name = type(found).__name__
            raise InputError(
                f"the loop has a {name} of its own that no checkpoint holds: a resumed run, and a worker that joins, would begin "
                f'it anew. Write run.register("{name.lower()}", scheduler) behind run.prepare; where it is the only one, '
                "run.prepare(model, optimizer, scheduler) keeps it, too."
            )


def _schedules_of(optimizer: Optimizer) -> list[LRScheduler]:
    """Return the schedules that hold this optimizer: torch keeps no list of them."""
    found = []
    for holder in gc.get_referrers(optimizer):
        if isinstance(holder, LRScheduler):
            found.append(holder)
        elif isinstance(holder, dict) and holder.get("optimizer") is optimizer:
            found += [one for one in gc.get_referrers(holder) if isinstance(one, LRScheduler)]
    return [one for one in found if one.optimizer is optimizer]


def _with_parts(kept: Iterable[Any]) -> list[Any]:
    """Return what is kept with what that is made of: the schedules of a SequentialLR, or of an object of the user's own."""
    found: list[Any] = []
    todo = [(one, 0) for one in kept if one is not None]
    while todo:
        one, depth = todo.pop()
        found.append(one)
        for value in vars(one).values() if depth < DEPTH and hasattr(one, "__dict__") else ():
            inside = value.values() if isinstance(value, dict) else value
            parts = inside if isinstance(value, list | tuple | dict) else [value]
            todo += [
                (part, depth + 1)
                for part in parts
                if isinstance(part, LRScheduler) or hasattr(part, "state_dict")
            ]
    return found
