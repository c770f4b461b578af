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
from paceline.compat.tensors import make_wrapper
from paceline.errors import InputError


class LostGradient(Tensor):
    """A gradient without values; a later pass may add to it, and every other operation on it raises."""

    @staticmethod
    def __new__(cls, leaf: Tensor) -> LostGradient:
        """Return one that torch takes for a gradient of `leaf`; it needs no memory."""
        made: LostGradient = make_wrapper(cls, leaf.shape, dtype=leaf.dtype, device=leaf.device)
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Refuse what the loop calls."""
        del func, types, args, kwargs
        _refuse_use()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Leave a lost gradient lost where a backward pass adds to it."""
        del func, types, kwargs
        if graph_task() == -1:
            _refuse_use()
        return next(one for one in args if isinstance(one, LostGradient))


def lose_gradient(member: GroupedParam, whole: Tensor) -> None:
    """Put what refuses its use in the place of a gradient that has reached the `whole` copy of a parameter."""
    # A loop may have taken the copy for the parameter: between passes what belongs to no block stays gathered for a while.
    for leaf in (whole, member.sharded):
        # In a step the loop's guard hides those of the rows behind a stand-in of its own.
        if leaf.grad is None or leaf is whole or isinstance(leaf.grad, DTensor):
            leaf.grad = LostGradient(leaf)


def _refuse_use() -> NoReturn:
    raise InputError(
        "the loop used gradients of a backward() of its own, outside of a step (an optimizer's step, a norm, a look at .grad), "
        "but between passes fsdp leaves each worker some rows of the weights, and such a pass reaches only copies that were "
        "gathered for it: nothing would be trained. Train in run.steps with step.backward(losses); for the gradient of an input "
        "(FGSM) call torch.autograd.grad(loss, x); or use --strategy ddp."
    )
