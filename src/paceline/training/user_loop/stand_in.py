"""Stands where a loop looks for a gradient that is elsewhere: whoever uses it is told so, in place of working on nothing.

A count of writes would not do: torch keeps none for work on a DTensor, nor through `.data`, and reading is wrong as well
where a worker has a part of the gradient only.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor

from paceline.compat.tensors import make_wrapper
from paceline.errors import InputError


class StandIn(Tensor):
    """A gradient without values; every operation on it raises, those of autograd's own engine included."""

    @staticmethod
    def __new__(cls, leaf: Tensor) -> StandIn:
        """Return one that torch takes for a gradient of `leaf`; it needs no memory."""
        made: StandIn = make_wrapper(cls, leaf.shape, dtype=leaf.dtype, device=leaf.device)
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Refuse what the loop calls."""
        del func, types, args, kwargs
        refuse_use()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        """Refuse what a backward pass adds."""
        del func, types, args, kwargs
        refuse_use()


def refuse_use() -> NoReturn:
    """Raise for a loop that works with gradients which are not there."""
    raise InputError(
        "the loop used gradients before step.apply() (clip_grad_norm_, a factor, a norm, zero_grad(), a backward() of its own), "
        "and with this strategy they are not in .grad: they lie in parts on the workers, or on servers. Clip with "
        "step.apply(max_grad_norm=1.0), whose result has the norm; leave zero_grad() out, every step begins without gradients; "
        "for the gradient of an input (FGSM) call torch.autograd.grad(loss, x), which leaves nothing to clear; for other work "
        "use optimizer.register_step_pre_hook under single, dp or ddp."
    )
