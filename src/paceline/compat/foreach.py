"""Operations on lists of tensors, a kernel launch for many of them: torch names them with an underscore."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

add_ = torch._foreach_add_
mul_ = torch._foreach_mul_
copy_ = torch._foreach_copy_
zero_ = torch._foreach_zero_
norm = torch._foreach_norm
"""Return the norm of each tensor, to the bit as `torch.nn.utils.clip_grad_norm_` takes it."""
chunk_cat: Callable[..., torch.Tensor] = torch._chunk_cat
"""Lay tensors out side by side after each was split into chunks, the last padded with zeros."""


def order_by_type(types: Sequence[torch.dtype]) -> list[list[int]]:
    """Return the places of tensors of these types, group by group, as torch's functions on lists take them."""
    empty = [torch.empty(0, dtype=dtype) for dtype in types]
    groups = _group_tensors_by_device_and_dtype([empty], with_indices=True)  # type: ignore[list-item]
    return [list(places) for _, places in groups.values()]
