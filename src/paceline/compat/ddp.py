"""What DistributedDataParallel offers to nobody but itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import methodcaller
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

rebuild_buckets: Callable[[Any], None] = methodcaller("_rebuild_buckets")
"""Put gradients into buckets in the order in which they came; `DDP.forward` does so before each pass."""


def leave_out(module: nn.Module, names: Sequence[str]) -> None:
    """Have DDP neither broadcast nor reduce the named parameters of a module that it is about to be given."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)  # type: ignore[no-untyped-call]
