"""Who holds the memory of a tensor."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

Holders = tuple[int, int]


def holders(tensor: Tensor) -> Holders:
    """Return how many hold a tensor's memory: views, arrays of numpy's, saved ones of autograd's, its storage in Python."""
    memory = tensor.untyped_storage()
    return torch._C._storage_Use_Count(memory._cdata), sys.getrefcount(memory)


def other_storage(tensor: Tensor) -> Tensor:
    """Return a tensor of the same memory that is held apart: whoever holds it counts once for all among the holders."""
    return torch.from_numpy(tensor.view(torch.uint8).numpy()).view(tensor.dtype)
