"""Finds a schedule that computes from weights or gradients: of parts it would go on with another rate on each worker."""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from types import CodeType, FunctionType
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.overrides import TorchFunctionMode

from paceline.errors import InputError
from paceline.strategies.reducer import Reducer


class Scheduled(Protocol):
    """What a schedule belongs to."""

    optimizer: Optimizer
    scheduler: LRScheduler | None
    reducer: Reducer

    @property
    def model(self) -> nn.Module:
        """The model that trains."""


class Looks(TorchFunctionMode):
    """Finds a schedule that computes from weights or gradients.

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
                self._found(told)
        return function(*args, **kwargs)

    def _is_trained(self, weight: nn.Parameter) -> bool:
        held = (one for group in self._replica.optimizer.param_groups for one in group["params"])
        return any(
            one is weight
            for one in chain(held, self._replica.model.parameters(), (one() for one in self._before))
        )

    def _found(self, told: str) -> None:  # noqa: ARG002
        """Have gradients lie where a schedule may keep them."""
        self._replica.reducer.give_up_sums()


class NoLooks(Looks):
    """Refuses such a schedule where a worker sees a part of the weights, or none."""

    def _found(self, told: str) -> None:
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
