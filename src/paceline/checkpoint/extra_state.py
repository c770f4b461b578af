"""What a checkpoint holds beside the tensors of model and optimizer: groups, schedule, scaler, the loop's own state."""

from __future__ import annotations

import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.checkpoint.manifest import EXTRA_STATE
from paceline.documents import shown
from paceline.errors import CheckpointError
from paceline.state.optimizer_state import NUMPY_KINDS, is_numpy

_NUMBER = (int, float, Tensor, np.number)
_NUMPY = "numpy dtype, shape and bytes in hex"
"""How a file says that a value is numpy's: torch's restricted unpickler knows nothing of it."""
_STREAM = {"began": str, "last": str, "first": str, "call": int, "call's first": str}
"""What a checkpoint knows of a stream."""
_WORDS = {dict: "a dict", list: "a list", str: "text", Tensor: "a tensor", int: "a number"}


def read_extra_state(folder: Path) -> dict[str, Any]:
    """Return it; nothing but tensors and plain values is unpickled, and a field of another type is refused by name."""
    try:
        extra_state = _decoded(torch.load(folder / EXTRA_STATE, map_location="cpu", weights_only=True))
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{EXTRA_STATE} holds objects other than tensors and numbers, and was refused"
        ) from error
    except (RuntimeError, LookupError, ValueError, TypeError, AttributeError, EOFError, OSError) as error:
        raise CheckpointError(f"{EXTRA_STATE} is not a file that torch.save wrote") from error
    if not isinstance(extra_state, dict) or not isinstance(extra_state.get("optimizer"), dict):
        raise CheckpointError(f"{EXTRA_STATE} does not hold the state of an optimizer")
    _check(extra_state)
    return extra_state


def write_extra_state(folder: Path, extra_state: Mapping[str, Any]) -> None:
    """Write it."""
    with (folder / EXTRA_STATE).open("wb") as file:
        torch.save(_encoded(extra_state), file)


def _encoded(value: Any) -> Any:
    """Return a state with numbers and arrays of numpy as plain values."""
    if is_numpy(value):
        shape = value.shape if isinstance(value, np.ndarray) else None
        return {_NUMPY: (value.dtype.str, shape, value.tobytes().hex())}
    return _mapped(_encoded, value)


def _decoded(value: Any) -> Any:
    """Return a state as it was before `_encoded`."""
    if not isinstance(value, dict) or value.keys() != {_NUMPY}:
        return _mapped(_decoded, value)
    kind, shape, data = value[_NUMPY]
    dtype = np.dtype(kind)
    if dtype.kind not in NUMPY_KINDS:
        raise TypeError(f"{dtype} is not a type of numbers or text")
    read = np.frombuffer(bytes.fromhex(data), dtype)
    return read[0] if shape is None else read.reshape(shape).copy()


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, dict):
        entries = {key: function(one) for key, one in value.items()}
        return type(value)(entries) if type(value) in (Counter, OrderedDict) else entries
    if isinstance(value, list | tuple):
        return type(value)(function(one) for one in value) if type(value) in (list, tuple) else value
    return value


def _check(extra_state: dict[str, Any]) -> None:
    """Raise CheckpointError where a field that all strategies read is not of the type they write."""
    optimizer = extra_state["optimizer"]
    for name in _items("optimizer: state", _there(optimizer, "state", "optimizer: "), dict):
        _be(f"optimizer: state: {shown(name)}", optimizer["state"][name], dict)
    for number in _items("optimizer: groups", _there(optimizer, "groups", "optimizer: "), list):
        where, group = f"optimizer: groups: {number}", optimizer["groups"][number]
        _be(where, group, dict)
        for place in _items(f"{where}: params", _there(group, "params", f"{where}: "), list):
            _be(f"{where}: params: {place}", group["params"][place], str)
        if "lr" in group:
            _be(f"{where}: lr", group["lr"], *_NUMBER)
    _items("optimizer: own", optimizer.get("own", {}), dict)
    schedule = _there(extra_state, "scheduler", "")
    if schedule is not None:
        # A schedule of the user's own may keep a list.
        _be("scheduler", schedule, dict, list, tuple)
        if isinstance(schedule, dict) and "last_epoch" in schedule:
            _be("scheduler: last_epoch", schedule["last_epoch"], *_NUMBER)
    if _there(extra_state, "scaler", "") is not None:
        _be("scaler", extra_state["scaler"], dict)
    for name in _items("buffers", extra_state.get("buffers", {}), dict):
        _be(f"buffers: {shown(name)}", extra_state["buffers"][name], Tensor)
    for name in _items("loop", extra_state.get("loop", {}), dict):
        _be("loop: a name in it", name, str)
    _items("between", extra_state.get("between", []), list)
    _items("changed", extra_state.get("changed", {}), dict)
    if "stream" in extra_state:
        _items("stream", extra_state["stream"], dict)
        for name, kind in _STREAM.items():
            _be(f"stream: {name}", _there(extra_state["stream"], name, "stream: "), kind)


def _there(found: Mapping[str, Any], name: str, where: str) -> Any:
    if name not in found:
        raise CheckpointError(f"{EXTRA_STATE}: {where}{name} is missing")
    return found[name]


def _items(where: str, value: Any, kind: type) -> Iterable[Any]:
    """Return the keys of a dict, or the places in a list."""
    _be(where, value, kind)
    return value if kind is dict else range(len(value))


def _be(where: str, value: Any, *kinds: type) -> None:
    if not isinstance(value, kinds) or (int in kinds and isinstance(value, bool)):
        raise CheckpointError(
            f"{EXTRA_STATE}: {where} is a {type(value).__name__}, but must be {_WORDS[kinds[0]]}"
        )
