"""Stands where a loop looks for the gradients of a backward pass of its own: they reached gathered copies, and no row.

The pass itself may be meant: an attack asks for the gradients of inputs, and clears those of weights. Whoever uses these, as
an optimizer of the loop's own does, would work on nothing, and is told so.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor
from torch.distributed.tensor import DTensor

from paceline.compat.autograd import graph_task
from paceline.compat.fsdp import GroupedParam
from paceline.errors import InputError
from paceline.strategies.guards.no_gradient import NoGradient


class LostGradient(NoGradient):
    """A gradient without values; a later pass may add to it, and every other operation on it raises."""

    @staticmethod
    def refuse_use() -> NoReturn:
        """Raise for a loop that works with it."""
        raise InputError(
            "the loop used gradients of a backward() of its own, outside of a step (an optimizer's step, a norm, a look at "
            ".grad, torch.autograd.grad for weights), but between passes fsdp leaves each worker some rows of the weights, and "
            "such a pass reaches only copies that were gathered for it: nothing would be trained. Train in run.steps with "
            "step.backward(losses); for the gradient of an input (FGSM) call torch.autograd.grad(loss, x); or use --strategy ddp."
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Leave a lost gradient lost where a backward pass adds to it."""
        del func, types, kwargs
        if graph_task() == -1:
            cls.refuse_use()
        return next(one for one in args if isinstance(one, LostGradient))


def lose_gradient(member: GroupedParam, whole: Tensor) -> None:
    """Put what refuses its use in the place of a gradient that has reached the `whole` copy of a parameter."""
    # A loop may have taken the copy for the parameter: between passes what belongs to no block stays gathered for a while.
    whole.grad = LostGradient.of(whole)
    lose_gradient_of(member.sharded)


def lose_gradient_of(rows: Tensor) -> None:
    """Put it in the place of the gradient of a worker's rows."""
    # In a step the loop's guard hides that behind a stand-in of its own.
    if rows.grad is None or isinstance(rows.grad, DTensor):
        rows.grad = LostGradient.of(rows)
