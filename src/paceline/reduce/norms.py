"""The norm of a whole gradient from the norms of its tensors, as torch's `get_total_norm` takes it in one process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from paceline.compat.foreach import order_by_type


def total_norm(norms: Tensor, types: Sequence[torch.dtype]) -> Tensor:
    """Return the norm of `norms`, those of gradients of these types in the model's order, each held exactly."""
    # torch takes one type after the other, in an order of its own that its own grouping knows.
    groups = order_by_type(types)
    real = [one.to_real() for one in types]
    measured = norms if len(groups) == 1 else norms[[place for inside in groups for place in inside]]
    found: Tensor = torch.linalg.vector_norm(
        measured.to(reduce(torch.promote_types, real or [torch.float32]))
    )
    return found
