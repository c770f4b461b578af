"""Puts the operator of this folder in the place of attention in a captured graph, where it computes the same."""

from __future__ import annotations

import math

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from paceline.compat.dispatch import is_transformed

HOPPER = (9, 0)
"""The GPUs that the kernels were measured on."""
OLD_CUDNN = 91500
"""Up to this version cuDNN is wrong for some lengths, and torch does not choose it either."""
WIDTHS = (64, 128)
"""The widths of a head that the kernels were measured for."""
MOST_HEADS = 65535
"""How many heads of all samples together one launch takes."""


def swap_attention(graph: fx.GraphModule, device: torch.device) -> bool:
    """Have a captured graph compute attention by kernels that repeat their bits; return whether it has any.

    torch's own choice there is FlashAttention-2, a generation behind: cuDNN's backward pass does not repeat its bits.
    """
    if not _is_measured(device):
        return False
    swapped = False
    for module in graph.modules():  # blocks that are recomputed are graphs of their own inside it
        if isinstance(module, fx.GraphModule):
            found = [one for one in module.graph.nodes if one.target is F.scaled_dot_product_attention]
            for node in found:
                node.target = attention
            if found:
                module.recompile()
                swapped = True
    return swapped


def _is_measured(device: torch.device) -> bool:
    """Return whether this is a GPU for which the kernels were measured, with a cuDNN that torch itself prefers there."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) == HOPPER
        and (torch.backends.cudnn.version() or 0) > OLD_CUDNN  # type: ignore[no-untyped-call]
    )


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute what `scaled_dot_product_attention` does; a graph's own call of it, so decided once, when it is compiled.

    Who has turned cuDNN's attention off, or differentiates by torch.func, gets what torch has.
    """
    if torch.is_autocast_enabled("cuda") and query.device.type == "cuda":
        lower = torch.get_autocast_dtype("cuda")
        query, key, value = (
            one.to(lower) if one.dtype != torch.float64 else one for one in (query, key, value)
        )
    if attn_mask is not None or dropout_p or not _fits(query, key, value):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    from paceline.strategies.attention.operator import CudnnAttention

    made: Tensor = CudnnAttention.apply(  # type: ignore[no-untyped-call]
        query, key, value, is_causal, 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    )
    return made


def _fits(query: Tensor, key: Tensor, value: Tensor) -> bool:
    return (
        query.device.type == "cuda"
        and torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
        and not any(map(is_transformed, (query, key, value)))
        and query.dtype in {torch.bfloat16, torch.float16}
        and query.ndim == 4
        and query.shape == key.shape == value.shape
        and query.dtype == key.dtype == value.dtype
        and query.shape[-1] in WIDTHS
        and 0 < query.shape[0] * query.shape[1] <= MOST_HEADS
        and query.shape[2] > 1
        and query[0].numel() < 2**31
        and all(one.stride(-1) == 1 and _is_laid_out(one) for one in (query, key, value))
    )


def _is_laid_out(tensor: Tensor) -> bool:
    """Return whether every number has a place of its own, as those of an expanded tensor have not."""
    return all(stride or size == 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
