"""What the fields of a manifest may be: one that fits its digest may still be mistyped, or made by hand. Imports no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from paceline import ranges
from paceline.checkpoint.stored import Stored, StoredChunk
from paceline.documents import DocumentError, check_fields, fits, number, shown

_POSITION = {
    "epoch": ranges.EPOCH,
    "step": ranges.STEPS_TAKEN,
    "number": ranges.STEPS_TAKEN,
    "phase": ranges.COUNT_OR_NONE,
    "first_epoch": ranges.EPOCH,
    "first_number": ranges.STEPS_TAKEN,
}
_META = {
    "batch_size": ranges.COUNT,
    "samples": ranges.SAMPLES,
    "seed": ranges.SEED,
    "shards": ranges.SHARDS,
    "workers": ranges.PROCESSES,
    "horizon": ranges.HORIZON,
}
EPOCH_TOTAL, EPOCH_WEIGHT = "epoch_total", "epoch_weight"
"""What the losses of the epoch so far came to, and their weight, as `float.hex` writes them."""
_DTYPE = re.compile(r"bool|bfloat16|u?int[1-9][0-9]?|(float|complex)[1-9][0-9]{0,2}(_[0-9a-z_]{1,20})?")
_EXTENT = ranges.Range(0, 2**63 - 1)


@dataclass(frozen=True)
class _Best:
    """What a run says of how well it did."""

    value: float
    mode: str
    metric: str


@dataclass(frozen=True)
class _Meta:
    """What a run says of itself, each as far as it is there; whatever else a manifest tells is for its reader."""

    task: str | None
    batch_size: int | None
    exactness: str | None
    horizon: int | None
    stream: bool
    samples: int
    seed: int
    shards: int
    strategy: str
    mesh: str
    frozen: list[str]
    best: dict[str, Any]
    turns: list[str]
    averaged: bool
    workers: int
    epoch_total: str
    epoch_weight: str


def check_position(position: Mapping[str, Any], step: int) -> None:
    """Raise DocumentError unless a run that has taken so many steps can stand at a position."""
    number("step", step, ranges.STEPS_TAKEN)
    for name, at in position.items():
        if name not in _POSITION:
            raise DocumentError(f"position: nothing in one is called {shown(name)}")
        number(f"position: {name}", at, _POSITION[name])
    for name in ("epoch", "step"):
        if name not in position:
            raise DocumentError(f"position: {name} is missing")
    if position.get("number", step) != step:
        raise DocumentError(f"position: number is {position['number']}, and the checkpoint is of step {step}")
    for first, name in (("first_epoch", "epoch"), ("first_number", "number"), ("step", "number")):
        if position.get(first, 0) > position.get(name, position.get(first, 0)):
            raise DocumentError(
                f"position: {first} is {position[first]}, which is behind its {name}, {position[name]}"
            )


def check_meta(meta: Mapping[str, Any]) -> None:
    """Raise DocumentError where a fact about a run is of another type than it must be, or out of range."""
    check_fields(meta, _Meta, where="meta: ")
    for name, within in _META.items():
        if meta.get(name) is not None:
            number(f"meta: {name}", meta[name], within)
    if "best" in meta:
        _check_best(meta["best"])
    for name in (EPOCH_TOTAL, EPOCH_WEIGHT):
        try:
            float.fromhex(meta.get(name, "0"))
        except (ValueError, OverflowError):
            raise DocumentError(f"meta: {name} is {shown(meta[name])}, but must be a number") from None


def _check_best(best: Mapping[str, Any]) -> None:
    check_fields(best, _Best, where="meta: best: ")
    missing = next((name for name in ("value", "mode", "metric") if name not in best), None)
    if missing is not None:
        raise DocumentError(f"meta: best: {missing} is missing")
    if best["mode"] not in ("max", "min"):
        raise DocumentError(f"meta: best: mode is {shown(best['mode'])}, and can be max or min")


def check_tensors(tensors: Mapping[str, Stored], sizes: Mapping[int, int]) -> None:
    """Raise DocumentError unless each tensor is made up of chunks that lie in parts of such `sizes`, in bytes."""
    used = dict.fromkeys(sizes, 0)
    for key, stored in tensors.items():
        where = f"tensors: {shown(key)}:"
        _check_extents(f"{where} shape", stored.shape)
        if not isinstance(stored.dtype, str) or _DTYPE.fullmatch(stored.dtype) is None:
            raise DocumentError(f"{where} dtype is {shown(stored.dtype)}, which is none")
        for bounds in stored.chunks:
            _check_box(where, bounds, stored.shape)
            if bounds.part not in used:
                raise DocumentError(
                    f"{where} a chunk of it lies in part {shown(bounds.part)}, which is not there"
                )
            used[bounds.part] += math.prod(bounds.shape) * stored.itemsize
        if sum(math.prod(bounds.shape) for bounds in stored.chunks) != math.prod(stored.shape):
            raise DocumentError(f"{where} the chunks do not make up the tensor")
        if len({bounds.part for bounds in stored.chunks}) < len(stored.chunks):
            raise DocumentError(f"{where} two of its chunks lie in one part")
        if len(stored.chunks) > 1:
            _check_apart(where, stored)
    for part, size in used.items():
        if size > sizes[part]:
            raise DocumentError(f"tensors: {size} bytes of them lie in part {part}, which has {sizes[part]}")


def _check_extents(what: str, extents: Any) -> None:
    if not fits(extents, tuple[int, ...]):
        raise DocumentError(f"{what} is {shown(extents)}, but must be whole numbers")
    for extent in extents:
        number(what, extent, _EXTENT)


def _check_box(where: str, bounds: StoredChunk, shape: tuple[int, ...]) -> None:
    _check_extents(f"{where} the offset of a chunk", bounds.offset)
    _check_extents(f"{where} the shape of a chunk", bounds.shape)
    ends = [begin + length for begin, length in zip(bounds.offset, bounds.shape, strict=False)]
    if not len(bounds.offset) == len(bounds.shape) == len(shape) or any(
        end > most for end, most in zip(ends, shape, strict=True)
    ):
        raise DocumentError(
            f"{where} a chunk of {list(bounds.shape)} at {list(bounds.offset)} is not inside of {list(shape)}"
        )


def _check_apart(where: str, stored: Stored) -> None:
    """Raise DocumentError where two chunks overlap. Along the axis with the most cuts, few have to be compared."""
    axis = max(
        range(len(stored.shape)),
        key=lambda one: len({bounds.offset[one] for bounds in stored.chunks}),
        default=0,
    )
    chunks = sorted(
        (bounds for bounds in stored.chunks if math.prod(bounds.shape)),
        key=lambda bounds: bounds.offset[axis:],
    )
    if all(left.offset[axis] + left.shape[axis] <= right.offset[axis] for left, right in pairwise(chunks)):
        return
    for place, left in enumerate(chunks):
        for right in chunks[place + 1 :]:
            if right.offset[axis] >= left.offset[axis] + left.shape[axis]:
                break
            if all(
                a < b + length and b < a + other
                for a, b, length, other in zip(
                    left.offset, right.offset, right.shape, left.shape, strict=True
                )
            ):
                raise DocumentError(f"{where} two of its chunks overlap at {list(right.offset)}")
