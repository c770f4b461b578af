"""What DTensor decides for itself, and which rows of one lie where."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

TO_NUMBER: Any = torch.ops.aten._local_scalar_dense.default
"""The operator by which a tensor becomes a Python number."""


def operator_handlers() -> dict[Any, Any]:
    """Return the live table of what DTensor does for an operator in place of its own way; keyed by operator."""
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    return handlers


def local_bounds(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return offset and shape of the part of a DTensor that this worker holds."""
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offset), tuple(shape)
