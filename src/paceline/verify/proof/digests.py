"""Short digests of tensors and batches: what a run is compared by, so that no tensor need be kept."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.checkpoint.fingerprint import raw_bytes
from paceline.data.resident import Rows
from paceline.verify.proof.record import Digests


def of_tensor(tensor: Tensor) -> str:
    """Digest type, shape and bits."""
    made = hashlib.blake2b(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), digest_size=12)
    made.update(raw_bytes(tensor).numpy().data)
    return made.hexdigest()


def of_named(tensors: Iterable[tuple[str, Tensor]]) -> Digests:
    """Digest each tensor under its name."""
    return {name: of_tensor(tensor) for name, tensor in tensors}


def of_values(tensors: Iterable[tuple[str, Tensor]]) -> Digests:
    """Digest each tensor under its name, a zero being a zero whatever its sign.

    A shard without samples adds nothing on one process and +0.0 on several, which turns a gradient's -0.0 into
    +0.0. No weight can tell; weights themselves are compared to the very bit.
    """
    return {name: of_tensor(_unsigned(tensor)) for name, tensor in tensors}


def _unsigned(tensor: Tensor) -> Tensor:
    """Return a tensor without negative zeros."""
    if tensor.is_complex():
        return torch.view_as_complex(torch.view_as_real(tensor.resolve_conj()) + 0.0)
    return tensor + 0.0 if tensor.is_floating_point() else tensor


def of_optimizer(state: Mapping[str, Any]) -> Digests:
    """Digest the optimizer's state, signs of zeros left out: `parameter: key` for each entry."""
    entries = [
        (f"{parameter}: {key}", value)
        for parameter, held in state["state"].items()
        for key, value in held.items()
    ]
    plain = {name: repr(value) for name, value in entries if not isinstance(value, Tensor)}
    return plain | of_values([(name, value) for name, value in entries if isinstance(value, Tensor)])


def of_batch(batch: Any) -> str:
    """Digest whatever a batch is made of; an object of an unknown kind counts by its type alone."""
    made = hashlib.blake2b(digest_size=12)
    for part in _parts(batch):
        made.update(part)
    return made.hexdigest()


def _parts(value: Any) -> Iterator[bytes]:
    if isinstance(value, Rows):
        value = value.to(value.rows.device)
    if isinstance(value, Tensor):
        yield of_tensor(value).encode()
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype}{value.shape}".encode()
        yield np.ascontiguousarray(value).tobytes()
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield repr(key).encode()
            yield from _parts(item)
    elif isinstance(value, (list, tuple)):
        yield f"[{len(value)}".encode()
        for item in value:
            yield from _parts(item)
    elif dataclasses.is_dataclass(value):
        yield from _parts([getattr(value, field.name) for field in dataclasses.fields(value)])
    elif value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        yield repr(value).encode()
    else:
        yield type(value).__qualname__.encode()
