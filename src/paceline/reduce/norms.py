"""The norm of a whole gradient from the norms of its tensors, as torch's `get_total_norm` takes it in one process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype


def total_norm(norms: Tensor, types: Sequence[torch.dtype]) -> Tensor:
    """Return the norm of `norms`, those of gradients of these types in the model's order, each held exactly."""
    empty = [torch.empty(0, dtype=dtype) for dtype in types]
    # torch takes one type after the other, in an order of its own that its own grouping knows.
    groups = _group_tensors_by_device_and_dtype([empty], with_indices=True).values()  # type: ignore[list-item]
    places = [place for _, inside in groups for place in inside]
    real = [one.to_real() for one in types]
    measured = norms if len(groups) == 1 else norms[places]
    found: Tensor = torch.linalg.vector_norm(
        measured.to(reduce(torch.promote_types, real or [torch.float32]))
    )
    return found
