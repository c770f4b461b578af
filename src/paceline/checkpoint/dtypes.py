"""Torch's types by the names that a manifest has for them."""

from __future__ import annotations

import torch

from paceline.errors import CheckpointError


def dtype_named(name: str) -> torch.dtype:
    """Return torch's type of a name in a manifest."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"the type {name} of a tensor is not known to torch {torch.__version__}")
    return found
