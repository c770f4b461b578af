"""Small Python values between workers: pickled, and carried by the tensor operations of any `Comm`."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch import Tensor

from paceline.compat import pickles
from paceline.world.base import Comm


def all_gather_object(comm: Comm, value: Any) -> list[Any]:
    """Collect everybody's value, in rank order, for everybody."""
    packed = _pack(value)
    lengths = [int(length) for length in comm.all_gather(torch.tensor(packed.numel()))]
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: packed.numel()] = packed
    return [_unpack(data[:length]) for data, length in zip(comm.all_gather(padded), lengths, strict=True)]


def broadcast_object(comm: Comm, value: Any, root: int = 0) -> Any:
    """Return the root's value on every worker; what the others pass is not looked at."""
    packed = _pack(value) if comm.rank == root else torch.empty(0, dtype=torch.uint8)
    length = int(comm.broadcast(torch.tensor(packed.numel()), root))
    buffer = packed if comm.rank == root else torch.empty(length, dtype=torch.uint8)
    return _unpack(comm.broadcast(buffer, root))


def _pack(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickles.dumps(value)), dtype=torch.uint8)


def _unpack(data: Tensor) -> Any:
    # The bytes come from workers of this very run, which run the same code with the same rights.
    return pickle.loads(data.numpy().tobytes())  # noqa: S301
