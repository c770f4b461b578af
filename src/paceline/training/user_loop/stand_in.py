"""Stands where a loop looks for a gradient that is elsewhere, or is another one: whoever uses it is told so.

A count of writes would not do: torch keeps none for work on a DTensor, nor through `.data`, and reading is wrong as well
where a worker has a part of the gradient only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor

from paceline.compat import foreach
from paceline.compat.tensors import has_compatible_memory, no_torch_function
from paceline.errors import InputError
from paceline.strategies.guards.absent import is_absent
from paceline.strategies.guards.no_gradient import NoGradient
from paceline.strategies.guards.partial_update import Scope
from paceline.strategies.placement import Placement

_METADATA = frozenset(
    {
        getattr(Tensor, name).__get__
        for name in ("grad_fn", "requires_grad", "is_sparse", "device", "dtype", "shape")
    }
) | {Tensor.numel, Tensor.size, Tensor.dim, Tensor.is_floating_point, Tensor.is_complex}
_CLEARING = frozenset({Tensor.zero_, Tensor.detach_, Tensor.requires_grad_, foreach.zero_})
"""What zero_grad(set_to_none=False) does."""
_MOVING = frozenset(
    {Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16}
) | {Tensor.data.__set__}  # type: ignore[attr-defined]
"""What `model.to(device)` does to gradients that it meets; most often the model is there."""


class StandIn(NoGradient):
    """Stands in the place of gradients that are not there."""

    @staticmethod
    def refuse_use() -> NoReturn:
        """Raise for a loop that works with them."""
        raise InputError(
            "the loop used gradients before step.apply() (clip_grad_norm_, a factor, a norm, zero_grad(), a backward() of its "
            "own), and with this strategy they are not in .grad: they lie in parts on the workers, or on servers. Clip with "
            "step.apply(max_grad_norm=1.0), whose result has the norm; leave zero_grad() out, every step begins without "
            "gradients; for the gradient of an input (FGSM) call torch.autograd.grad(loss, x), which leaves nothing to clear; "
            "for other work use optimizer.register_step_pre_hook under single, dp or ddp."
        )


class HookStandIn(NoGradient):
    """Stands in the place of gradients that a hook of a task sees a part of, or none."""

    @staticmethod
    def refuse_use() -> NoReturn:
        """Raise for a hook that works with them."""
        raise InputError(
            "on_step used gradients, and with this strategy they are not whole in .grad behind an update: they lie in parts on "
            "the workers, or on servers, and each worker would compute something else. With max_grad_norm the norm is "
            "info.gradient_norm; for other work use --strategy single, dp or ddp."
        )


class PastSum(NoGradient):
    """Stands in the place of gradients that a loop sees a part of, or none, once the step is applied."""

    @staticmethod
    def refuse_use() -> NoReturn:
        """Raise for a loop that works with them."""
        raise InputError(
            "the loop used gradients behind step.apply(), and with this strategy they are not whole in .grad there: they lie in "
            "parts on the workers, or on servers, and each worker would compute something else. With max_grad_norm the norm is "
            "step.result.norm; before a backward() of your own call model.zero_grad(); for other work use single, dp or ddp "
            "without --shard-optimizer."
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse what the loop calls, other than to clear it or to count its bytes."""
        if func in _METADATA:
            with no_torch_function():
                return func(*args, **kwargs or {})
        if func is has_compatible_memory:
            return True
        return args[0] if func in _CLEARING | _MOVING else cls.refuse_use()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Take what a backward pass of the loop's own adds on the way to another gradient: nobody reads the sum."""
        return args[0] if func is torch.ops.aten.add_.Tensor else cls.refuse_use()


def in_parts(placement: Placement) -> list[Tensor]:
    """Return the parameters whose gradients this worker does not have as a whole behind an update."""
    # Who updates all of the model has all gradients.
    parts = () if placement.scope is Scope.ALL else placement.model.parameters()
    return [one for one in parts if not is_absent(one)]


@contextmanager
def hiding(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Have stand-ins in `.grad`, for the duration of the context; a leaf whose gradient is cleared there has it again behind."""
    held = [(leaf, leaf.grad) for leaf in leaves if leaf.requires_grad]
    try:
        for leaf, _ in held:
            leaf.grad = HookStandIn.of(leaf)
        yield
    finally:
        for leaf, gradient in held:
            leaf.grad = gradient


class EarlySum(NoGradient):
    """Stands in the place of sums that are there before the loop has done with its batches."""

    @staticmethod
    def refuse_use() -> NoReturn:
        """Raise for a loop that works with them."""
        raise InputError(
            "the loop used gradients inside `for batch in step` behind its last step.backward() (a norm, clip_grad_norm_, "
            "zero_grad(), a backward() of its own): there .grad is the sum of all workers already, with one worker a shard's. "
            "Look at it behind the batches, before step.apply(): there it is the sum on any number of workers; clip with "
            "step.apply(max_grad_norm=1.0); for the gradient of an input (FGSM) call torch.autograd.grad(loss, x)."
        )
