"""Moving a batch to a device or into pinned memory, whatever it is made of."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def to_device(batch: Any, device: torch.device | str, non_blocking: bool = False) -> Any:
    """Return the batch with everything that can move on the device: tensors, and objects with a method `to`.

    Looks into tuples, lists, dicts, namedtuples and dataclasses; anything else is handed on as it is.
    """
    # As most batches are.
    if type(batch) in (list, tuple) and all(isinstance(part, Tensor) for part in batch):
        return type(batch)([part.to(device, non_blocking=non_blocking) for part in batch])

    def move(part: Any) -> Any:
        if isinstance(part, Tensor):
            return part.to(device, non_blocking=non_blocking)
        return part.to(device) if callable(getattr(part, "to", None)) else _NOT_A_LEAF

    return _rebuilt(batch, move)


def pinned(batch: Any) -> Any:
    """Return the batch with its tensors in pinned memory, from where copies to a device need not block."""

    def pin(part: Any) -> Any:
        return part.pin_memory() if callable(getattr(part, "pin_memory", None)) else _NOT_A_LEAF

    return _rebuilt(batch, pin)


_NOT_A_LEAF = object()


def _rebuilt(part: Any, change: Callable[[Any], Any]) -> Any:
    """Copy a nest of containers, with `change` applied to its leaves."""
    changed = change(part)
    if changed is not _NOT_A_LEAF:
        return changed
    if isinstance(part, tuple):
        members = [_rebuilt(member, change) for member in part]
        return type(part)(*members) if hasattr(part, "_fields") else type(part)(members)
    if isinstance(part, list):
        return type(part)([_rebuilt(member, change) for member in part])
    if isinstance(part, Mapping):
        return _rebuilt_mapping(part, change)
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        clone = copy.copy(part)
        for field in dataclasses.fields(part):
            # Frozen dataclasses and fields without an __init__ argument rule out both setattr and replace().
            object.__setattr__(clone, field.name, _rebuilt(getattr(part, field.name), change))
        return clone
    return part


def _rebuilt_mapping(part: Mapping[Any, Any], change: Callable[[Any], Any]) -> Any:
    members = {key: _rebuilt(value, change) for key, value in part.items()}
    if type(part) is dict or not isinstance(part, dict):
        return members
    clone = copy.copy(part)  # a subclass may hold more than its members, as defaultdict does
    clone.update(members)
    return clone
