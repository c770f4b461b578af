"""One number that says whether two sets of weights are the same bits."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from paceline.errors import CheckpointError


def weights_sha256(state: Mapping[str, Tensor]) -> str:
    """Return the sha256 over name, type, shape and raw bytes of every tensor, sorted by name."""
    return digest((name, state[name]) for name in sorted(state))


def digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return the same of tensors that come one by one, sorted by name; raise if none come."""
    made = hashlib.sha256()
    empty = True
    for name, tensor in tensors:
        made.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        made.update(raw_bytes(tensor).numpy().data)
        empty = False
    if empty:
        raise CheckpointError("there are no weights to take a sha256 of: one of nothing would fit any model.")
    return made.hexdigest()


def raw_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of any tensor, wherever it is, as a flat uint8 tensor on the CPU."""
    bare = tensor.detach().resolve_conj().resolve_neg().to("cpu")
    return bare.contiguous().reshape(-1).view(torch.uint8)
