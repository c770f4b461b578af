"""Attention as one operator: cuDNN's forward pass, which repeats its bits, and kernels for the backward pass that do so too."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from paceline.compat.dispatch import cudnn_attention
from paceline.strategies.attention.kernels import dot_kernel, key_value_kernel, query_kernel

MOST_ROWS = 64
"""Every block and every step divides this."""


class Tiles(NamedTuple):
    """What one program computes: its rows, the rows it takes at a time, its warps and the steps it loads ahead."""

    block: int
    step: int
    warps: int
    stages: int


KEY_VALUE = {64: Tiles(64, 32, 4, 4), 128: Tiles(64, 64, 4, 2)}
"""By the width of a head, for the gradients of keys and values: the fastest of 40 on an H200."""
QUERY = {64: Tiles(64, 64, 4, 3), 128: Tiles(64, 32, 4, 3)}
"""The same for the gradient of queries."""


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor, *tensor.stride()[:3]


def _room_for(gradient_of: Tensor) -> Tensor:
    """Return room in which the heads of a token lie side by side, whatever the layout of what was given."""
    batch, heads, length, width = gradient_of.shape
    return gradient_of.new_empty(batch, length, heads, width).transpose(1, 2)


# No operator that the compiler looks into: it would take the strides that it foresees for those that come.
@torch.library.custom_op("paceline::attention_backward", mutates_args=())
def attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values; `sums` are the logarithms of each row's sum of exponentials."""
    batch, heads, length, width = query.shape
    query, key, value, grad, out = (
        one if one.stride(-1) == 1 and one.stride(2) * length < 2**31 else one.contiguous()
        for one in (query, key, value, grad, out)
    )  # kernels count within one head in 32 bits
    sums = sums.contiguous()
    dots = torch.empty(batch, heads, length, device=query.device, dtype=torch.float32)
    query_grad, key_grad, value_grad = map(_room_for, (query, key, value))
    even = length % MOST_ROWS == 0

    def grid(rows: int) -> tuple[int, int]:
        return -(-length // rows), batch * heads

    dot_kernel[grid(MOST_ROWS)](
        *_place(out), *_place(grad), dots, heads, length, width=width, block=MOST_ROWS, even=even
    )
    given = *_place(query), *_place(key), *_place(value), *_place(grad)
    rest = sums, dots, heads, length, scale
    tiles = KEY_VALUE[width]
    key_value_kernel[grid(tiles.block)](
        *given, *_place(key_grad), *_place(value_grad), *rest,
        width=width, block=tiles.block, step=tiles.step, causal=causal, even=even,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    tiles = QUERY[width]
    query_kernel[grid(tiles.block)](
        *given, *_place(query_grad), *rest,
        width=width, block=tiles.block, step=tiles.step, causal=causal, even=even,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return query_grad, key_grad, value_grad


@attention_backward.register_fake
def _(
    grad: Tensor,  # noqa: ARG001
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,  # noqa: ARG001
    sums: Tensor,  # noqa: ARG001
    causal: bool,  # noqa: ARG001
    scale: float,  # noqa: ARG001
) -> tuple[Tensor, Tensor, Tensor]:
    return _room_for(query), _room_for(key), _room_for(value)


class CudnnAttention(torch.autograd.Function):
    """Attention of queries to as many keys, all or those before them, without dropout."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> Tensor:
        """Return the weighted values."""
        out, sums = cudnn_attention(query, key, value, causal=causal, scale=scale)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.causal, ctx.scale = causal, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of queries, keys and values."""
        return *attention_backward(grad, *ctx.saved_tensors, ctx.causal, ctx.scale), None, None
