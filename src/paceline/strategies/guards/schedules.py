"""Steps a learning-rate schedule, and refuses what torch cannot step: it would fail at a milestone, hours later."""

from __future__ import annotations

import functools
import traceback
import weakref
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from types import CodeType, FunctionType
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import SGD, Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler
from torch.overrides import TorchFunctionMode

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


class Scheduled(Protocol):
    """What a schedule belongs to."""

    optimizer: Optimizer
    scheduler: LRScheduler | None

    @property
    def model(self) -> nn.Module:
        """The model that trains."""


class NoLooks(TorchFunctionMode):
    """Refuses what a schedule computes from weights or gradients, where a worker sees a part of them, or none.

    What torch does with a weight meanwhile comes by here, whoever calls it; what is alike on all workers may be asked.
    """

    def __init__(self, replica: Scheduled) -> None:
        super().__init__()
        self._replica = replica
        self._before = [weakref.ref(one) for one in replica.model.parameters()]
        """Those that a schedule may have kept from before they were cut."""

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Compute what is asked for, or raise."""
        kwargs, name = kwargs or {}, function.__name__
        told = getattr(function.__self__, "__name__", name) if name == "__get__" else name
        if told not in _ALIKE:
            given = chain(
                *(one if isinstance(one, list | tuple) else (one,) for one in (*args, *kwargs.values()))
            )
            if any(isinstance(one, nn.Parameter) and self._is_trained(one) for one in given):
                self._refuse(told)
        return function(*args, **kwargs)

    def _is_trained(self, weight: nn.Parameter) -> bool:
        held = (one for group in self._replica.optimizer.param_groups for one in group["params"])
        return any(
            one is weight
            for one in chain(held, self._replica.model.parameters(), (one() for one in self._before))
        )

    def _refuse(self, told: str) -> None:
        """Raise, unless one of the functions that are at work says that it may."""
        stack = [frame for frame, _ in traceback.walk_stack(None)]
        if {frame.f_code for frame in stack}.intersection(_permitted(self._replica.scheduler)):
            return
        ours = ("torch.", "paceline.")
        asking = next(one for one in stack if not str(one.f_globals.get("__name__")).startswith(ours))
        raise InputError(
            f"the schedule looks at {told!r} of a weight in {asking.f_code.co_qualname}, and here each worker sees some of the "
            "gradients and weights only. Use single, dp or ddp without --shard-optimizer; a function or a class of schedules "
            "that looks at no more than one number at a time says so: elementwise = True."
        )


_ALIKE = frozenset(
    {"requires_grad", "is_leaf", "dtype", "device", "layout", "is_cuda", "ndim", "dim", "__hash__"}
) | {"is_floating_point", "is_complex", "requires_grad_", "__set__", "__delete__"}
"""What is the same of a part of a weight as of all of it, and what looks at nothing."""


def _permitted(value: Any, depth: int = 5) -> Iterator[CodeType]:
    """Yield the code of those functions of a schedule, and of its parts, that may look at weights."""
    value = getattr(value, "__func__", value)
    if getattr(value, "elementwise", False):
        own = (
            [value]
            if isinstance(value, FunctionType)
            else [*chain(*(vars(one).values() for one in type(value).__mro__))]
        )
        yield from (one.__code__ for one in own if isinstance(one, FunctionType))
    parts = value if isinstance(value, list | tuple) else getattr(value, "__dict__", {}).values()
    for one in parts if depth and not isinstance(value, Optimizer | type | FunctionType) else ():
        yield from _permitted(list(one.values()) if isinstance(one, dict) else one, depth - 1)


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
