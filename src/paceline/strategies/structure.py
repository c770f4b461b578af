"""What a task says of its model's structure; everything has a default that is found from the model itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


@dataclass(frozen=True, kw_only=True)
class Structure:
    """Where a model may be cut. Names are those of `named_modules`, patterns like `blocks.*` included."""

    blocks: Sequence[str] | None = None
    """The modules that are gathered, and recomputed, as one."""
    tensor_plan: Mapping[str, str | ParallelStyle] | None = None
    """How each split layer is split: "columns", "rows", or a ParallelStyle of torch's."""
    stages: Sequence[str] | None = None
    """The modules at which a new pipeline stage begins, in the order of the forward pass."""
