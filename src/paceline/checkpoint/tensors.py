"""State as plain tensors and plain values, the way a checkpoint can hold it."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.state.chunks import MODEL, TensorChunk
from paceline.state.optimizer_state import is_numpy

# Schedules of torch keep these two in their state, and torch's restricted unpickler knows them.
_KNOWN_MAPPINGS: tuple[type, ...] = (dict, OrderedDict, Counter)


def dense(value: Any, where: str) -> Tensor:
    """Return the bare tensor if it has all of its values in memory of its own."""
    bare = value.detach() if isinstance(value, Tensor) else value
    if type(bare) is not Tensor or bare.layout is not torch.strided or bare.is_quantized or bare.is_meta:
        kind = f"{bare.layout} tensor on {bare.device}" if type(bare) is Tensor else type(bare).__name__
        raise CheckpointError(
            f"cannot save {where}: it is a {kind}, and a checkpoint holds whole, dense tensors. "
            "Gather it first, or keep it out of the state."
        )
    return bare


def whole(bare: Tensor) -> Tensor:
    """Return a dense tensor contiguous, on the CPU and without the rest of a larger storage."""
    bare = bare.resolve_conj().resolve_neg().to("cpu").contiguous()
    if bare.untyped_storage().nbytes() != bare.numel() * bare.element_size():
        return bare.clone()
    return bare


def tied(chunks: Mapping[str, TensorChunk]) -> dict[str, str]:
    """Find the tied weights: the keys of a model's tensors that are another's very memory, each with that one's key."""
    aliases: dict[str, str] = {}
    first: dict[tuple[object, ...], str] = {}
    for key, chunk in chunks.items():
        values = chunk.values
        if values.numel() and key.startswith(f"{MODEL}/"):
            address = (values.device, values.data_ptr(), values.is_conj(), values.is_neg())
            layout = (values.dtype, values.shape, values.stride(), chunk.bounds, chunk.meta)
            if first.setdefault((address, layout), key) != key:
                aliases[key] = first[address, layout]
    return aliases


def plain(value: Any, where: str) -> Any:
    """Copy a nested state down to tensors, numbers, strings, arrays, dicts, lists and tuples, and nothing else."""
    if isinstance(value, Tensor):
        return whole(dense(value, where))
    if is_numpy(value):
        return value.copy()
    if value is None or isinstance(value, (bool, int, float, str)):
        return _scalar(value)
    if isinstance(value, (list, tuple)):
        items = [plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, Mapping):
        entries = {_key(key, where): plain(item, f"{where}.{key}") for key, item in value.items()}
        return type(value)(entries) if type(value) in _KNOWN_MAPPINGS else entries  # type: ignore[call-arg]
    raise CheckpointError(
        f"cannot save {where}: it is a {type(value).__name__}, and a checkpoint holds only tensors, numbers, "
        "strings, dicts and lists. Keep it out of the state, or give it as one of those."
    )


def _key(value: Any, where: str) -> Any:
    """Return what a dict is asked by: a number of numpy is equal to Python's own."""
    return _scalar(value.item()) if isinstance(value, np.generic) else plain(value, where)


def _scalar(value: Any) -> Any:
    """Return the bare value that an enum or a number of some library stands for."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    return str.__str__(value) if isinstance(value, str) else value
