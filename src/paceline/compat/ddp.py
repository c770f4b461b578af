"""What DistributedDataParallel offers to nobody but itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def leave_out(module: nn.Module, names: Sequence[str]) -> None:
    """Have DDP neither broadcast nor reduce the named parameters of a module that it is about to be given."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)  # type: ignore[no-untyped-call]


def rebuild_buckets(reducer: Any) -> None:
    """Put gradients into buckets in the order in which they came; `DDP.forward` does so before each pass."""
    reducer._rebuild_buckets()
