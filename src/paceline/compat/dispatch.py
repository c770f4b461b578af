"""Operators seen one by one as torch dispatches them, and what an operator says of itself."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode,
    is_traceable_wrapper_subclass,
)

__all__ = ["TorchDispatchMode", "is_traceable_wrapper_subclass"]

no_modes = _disable_current_modes
"""A context in which no dispatch mode sees what is computed."""
current_mode = _get_current_dispatch_mode
"""Return the dispatch mode that was entered last, the first to see an operation."""
is_transformed = _functorch.is_functorch_wrapped_tensor
"""Return whether a tensor is one of torch.func's, inside `grad` or `vmap`."""
ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
"""The operators of torch.ops.aten that `scaled_dot_product_attention` ends in; a build may have some of them only."""
_DIFFERENTIATING = (_functorch.TransformType.Grad, _functorch.TransformType.Jvp)


def is_differentiated() -> bool:
    """Return whether this is called inside a function that torch.func differentiates; what is compiled is not asked."""
    stack = None if torch.compiler.is_compiling() else _functorch.get_interpreter_stack()
    return stack is not None and any(one.key() in _DIFFERENTIATING for one in stack)


def name_of(operator: Any) -> str:
    """Return an operator's full name without its overload: "aten::copy_"."""
    name: str = operator._schema.name
    return name


def arguments_of(operator: Any) -> Any:
    """Return what an operator says of its arguments, each with a name and whether it is written to."""
    return operator._schema.arguments


def returns_of(operator: Any) -> Any:
    """Return what an operator says of its results, each with whether it shares memory with an argument."""
    return operator._schema.returns


@cache
def aten_operators() -> list[Any]:
    """Return all operators of torch itself (some 3000; 0.2 s to find)."""
    named = [
        name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names() if "aten::" in name
    ]
    parts = [name.partition(".") for name in sorted(named)]
    return [getattr(getattr(torch.ops.aten, name), overload or "default") for name, _, overload in parts]


def overloads(name: str) -> list[Any]:
    """Return the operators of one name in torch.ops.aten, none where it has none."""
    packet = getattr(torch.ops.aten, name, None)
    return [] if packet is None else [getattr(packet, overload) for overload in packet.overloads()]


def cudnn_attention(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute attention with cuDNN, without a mask; also return the logarithm of each row's sum of exponentials."""
    operator = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    out, sums, *_ = operator(query, key, value, None, True, 0.0, causal, False, scale=scale)
    return out, sums
