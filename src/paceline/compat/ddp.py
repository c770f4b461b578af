"""What DistributedDataParallel offers to nobody but itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

rebuild_buckets: Callable[[Any], None] = methodcaller("_rebuild_buckets")
"""Put gradients into buckets in the order in which they came; `DDP.forward` does so before each pass."""

_SENT = frozenset({
    torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex32, torch.complex64, torch.complex128,
})  # fmt: skip
"""The types that gloo can broadcast; of any other one the bytes have to be sent."""


def can_send(tensor: Tensor) -> bool:
    """Return whether DDP can broadcast a tensor of this type, gloo's being fewer than nccl's."""
    return tensor.dtype in _SENT


def leave_out(module: nn.Module, names: Sequence[str]) -> None:
    """Have DDP neither broadcast nor reduce the named parameters and buffers of a module that it is about to be given."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)  # type: ignore[no-untyped-call]
