"""From summed gradients to the ones the optimizer takes: divide by the true weight, clip by the true norm."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

import torch
from torch import Tensor

from paceline.compat import foreach
from paceline.compat.autograd import run_engine
from paceline.reduce import norms
from paceline.task import Loss, as_float


def total_norm(measured: Sequence[Tensor]) -> Tensor:
    """Return the norm of some gradients together, the same wherever they lie."""
    return norms.total_norm(norms.norms(measured), [one.dtype for one in measured])


def finish(gradients: Sequence[Tensor], factor: Tensor | float, max_grad_norm: float | None) -> Tensor | None:
    """Multiply by `factor`, clip to a largest norm, and return the norm before clipping (None if nobody asked)."""
    norm: Tensor | None = None
    if max_grad_norm is not None:
        norm = total_norm(gradients) * factor
        factor = clipped(norm, factor, max_grad_norm)
    scale(gradients, factor)
    return norm


def clipped(norm: Tensor, factor: Tensor | float, max_grad_norm: float) -> Tensor | float:
    """Return the factor that also brings gradients of this norm, `factor` included, to the largest one allowed."""
    # The same guard against division by zero as torch's clip_grad_norm_.
    return factor * torch.clamp(max_grad_norm / (norm + 1e-6), max=1.0)


def scale(gradients: Sequence[Tensor], factor: Tensor | float) -> None:
    """Multiply all by `factor`, in place; nothing is touched when there is nothing to do."""
    if isinstance(factor, Tensor) and factor.device.type == "cpu":
        factor = factor.item()
    # None of them may be here: all that is trained may be tables on servers.
    if gradients and (isinstance(factor, Tensor) or factor != 1.0):
        foreach.mul_(list(gradients), factor)


def ledger_type(parameters: Iterable[Tensor]) -> torch.dtype:
    """Return the type in which losses and weights are added up, whatever torch's default is: 64 bits where a parameter has them.

    A gradient of 64 bits that was divided by a weight of 32 would be no better than one of 32.
    """
    wide = any(one.dtype in (torch.float64, torch.complex128) for one in parameters)
    return torch.float64 if wide else torch.float32


def loss_entry(loss: Loss, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return what a loss adds to the ledger, its sum and its weight, without making a GPU wait.

    `size` is the number of samples of the global batch, by which the backward pass of `loss` divides.
    """
    device, weight = loss.total.device, loss.weight
    share = _rounded_share(loss.total.dtype, size)
    if device.type == "cpu":
        return torch.tensor([loss.total.item() * share, as_float(weight) * share], dtype=dtype)
    if isinstance(weight, Tensor):
        placed = weight.detach().to(device, dtype, non_blocking=True).reshape(())
    else:  # a copy would wait, a fill does not
        placed = torch.full((), as_float(weight), dtype=dtype, device=device)
    entry = torch.stack([loss.total.detach().to(dtype), placed])
    return entry if share == 1.0 else entry.mul_(share)


@cache
def _rounded_share(dtype: torch.dtype, size: int) -> float:
    """Return by how much one over `size` is off in 16 bits, up to 0.4 %; 1 in types with more.

    The backward pass of a 16-bit total starts from that number, so its gradients are off by as much. Its weight is
    entered with the same factor: the division by the sum of the weights takes it out again.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return 1.0
    return float(torch.tensor(1.0 / size, dtype=dtype)) * size


def of_leaves(root: Tensor, start: Tensor, leaves: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the gradients of some leaves, as `.grad` would have them, and leave `.grad` alone."""
    found = run_engine(
        (root,), (start,), False, False, tuple(leaves), allow_unreachable=True, accumulate_grad=False
    )
    return list(map(own, found, leaves))


def own(gradient: Tensor | None, leaf: Tensor) -> Tensor | None:
    """Return a gradient in memory of its own, laid out as its leaf, as `.grad` has it.

    A backward pass that accumulates nothing may give one tensor for two leaves (of their sum), one number in the place of many,
    or the very tensor that the pass began with.
    """
    if gradient is None or gradient.layout != torch.strided:
        return gradient
    if leaf.is_contiguous():
        return gradient.clone(memory_format=torch.contiguous_format)
    return torch.empty_like(leaf).copy_(gradient)
