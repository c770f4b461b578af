"""Whether two states agree: does a checkpoint fit this model, and is it the very same state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.fingerprint import raw_bytes
from paceline.errors import CheckpointError
from paceline.state.chunks import TensorMeta

_MOST_NAMED = 5


def check_fits(
    model_state: Mapping[str, Tensor | TensorMeta], saved: Mapping[str, Tensor | TensorMeta]
) -> None:
    """Raise CheckpointError in one line unless a saved state has the names and shapes of a model's."""
    missing = [name for name in model_state if name not in saved]
    unexpected = [name for name in saved if name not in model_state]
    reshaped = [
        f"shape of {name} is {tuple(saved[name].shape)} there and {tuple(tensor.shape)} here"
        for name, tensor in model_state.items()
        if name in saved and saved[name].shape != tensor.shape
    ]
    parts = [
        *([f"missing {_some(missing)}"] if missing else []),
        *([f"unexpected {_some(unexpected)}"] if unexpected else []),
        *([_some(reshaped)] if reshaped else []),
    ]
    if parts:
        raise CheckpointError(
            f"the checkpoint belongs to another model: {', '.join(parts)}. "
            "Use the model it was saved from, with all that its loop put in later, or start without it."
        )


def same(left: Any, right: Any) -> bool:
    """Return whether two nested states are equal to the bit, a NaN being equal to itself."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return (
            left.dtype == right.dtype
            and left.shape == right.shape
            and torch.equal(raw_bytes(left), raw_bytes(right))
        )
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        return False
    return bool(left == right or (left != left and right != right))  # noqa: PLR0124


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    more = len(listed) - _MOST_NAMED
    return ", ".join(listed[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
