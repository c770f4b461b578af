"""Steps a learning-rate schedule, and refuses what torch cannot step: it would fail at a milestone, hours later."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Iterator
from types import CodeType, FunctionType

import torch
from torch import nn
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


def check_looks(scheduler: object) -> None:
    """Raise for a schedule of the user's own that looks at gradients or weights, where a worker sees a part of them, or none."""
    for function in _own_functions(scheduler, set()):
        named = _names_in(function.__code__) & _LOOKS
        if named and not getattr(scheduler, "elementwise", False):
            raise InputError(
                f"the schedule looks at {min(named)!r} in {function.__qualname__}, and here each worker sees some of the "
                "gradients and weights only. Use single, dp or ddp without --shard-optimizer; a schedule that looks at no more "
                "than one number at a time says so in its class: elementwise = True."
            )


_LOOKS = frozenset({"grad", "params", "parameters", "named_parameters"})


def _own_functions(value: object, seen: set[int]) -> Iterator[FunctionType]:
    """Yield the functions of a schedule that neither torch nor paceline has written, those of its parts too."""
    if id(value) in seen:
        return
    seen.add(id(value))
    value = getattr(value, "__func__", value)
    if isinstance(value, FunctionType):
        if not str(value.__globals__.get("__name__", "")).startswith(("torch.", "paceline.")):
            yield value
        return
    parts: list[object] = list(value) if isinstance(value, list | tuple) else []
    if isinstance(value, LRScheduler):
        parts = list(vars(value).values())
    if isinstance(value, LRScheduler) or (callable(value) and not isinstance(value, nn.Module | type)):
        parts += [one for kind in type(value).__mro__ for one in vars(kind).values() if callable(one)]
    for one in parts:
        if isinstance(one, list | tuple | LRScheduler) or callable(one):
            yield from _own_functions(one, seen)


def _names_in(code: CodeType) -> set[str]:
    """Return the names and the constants of a code, functions inside of it included."""
    inner = [one for one in code.co_consts if isinstance(one, CodeType)]
    constants = {one for one in code.co_consts if isinstance(one, str)}
    return {*code.co_names, *constants}.union(*map(_names_in, inner))


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
