"""How large a difference is, and what size rounding alone can explain.

A numeric promise is held to this bound: the weights' and the loss's relative difference after step k (counted
from 0) is at most 1e-5 + 5e-6 k, so 1.05e-4 after 20 steps. 1e-5 is 84 roundings of float32: a sum over shards
taken in another order, with room for some cancellation. Each update adds a rounding of its own, so the
difference may grow by as much with every step; one that grows faster than linearly feeds on itself, and that is
a divergence. A wrong gradient is far outside: one lost sample in a batch of 64 changes it by about 1e-2. Under
bf16 and fp16 each operation rounds to 8 or 11 bits, which averages out over a batch: the bound is 200 times wider.

A tensor's difference is its largest one, relative to the tensor's largest value, or to the typical value of all
tensors of its kind where the tensor itself is close to zero (a fresh bias, say).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FIRST, GROWTH = 1e-5, 5e-6
HALF_PRECISION = 200.0


def bound(step: int, precision: str) -> float:
    """Give the largest relative difference that a numeric promise allows after `step` earlier steps."""
    return (FIRST + GROWTH * step) * (1.0 if precision == "fp32" else HALF_PRECISION)


@dataclass(frozen=True, kw_only=True)
class Size:
    """The largest difference of one kind in one step."""

    step: int
    kind: str
    name: str
    relative: float
    absolute: float


def measure(step: int, reference: Path, candidate: Path) -> list[Size]:
    """Compare two dumps of the same step: the largest difference of each kind."""
    mine, theirs = (
        torch.load(path, map_location="cpu", weights_only=True) for path in (reference, candidate)
    )
    found = [
        size
        for kind in ("gradient", "weight", "optimizer state", "buffer")
        if (size := largest(step, kind, mine[kind], theirs[kind])) is not None
    ]
    gap = abs(mine["loss"] - theirs["loss"])
    if gap:
        relative = gap / abs(mine["loss"]) if mine["loss"] else math.inf
        found.append(
            Size(step=step, kind="loss", name="of the global batch", relative=relative, absolute=gap)
        )
    return found


def largest(step: int, kind: str, mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> Size | None:
    """Give the largest relative difference between tensors of the same name; None where there is none."""
    typical = _typical(mine)
    sizes = [
        _size(step, kind, name, mine.get(name), theirs.get(name), typical) for name in {**mine, **theirs}
    ]
    return max((size for size in sizes if size.absolute), key=lambda size: size.relative, default=None)


def of_tensor(step: int, kind: str, name: str, reference: Path, candidate: Path) -> Size | None:
    """Give the difference of one named tensor in two dumps; None where a dump does not hold that kind."""
    mine, theirs = (
        torch.load(path, map_location="cpu", weights_only=True) for path in (reference, candidate)
    )
    if not isinstance(mine.get(kind), dict) or name not in mine[kind]:
        return None
    return _size(step, kind, name, mine[kind].get(name), theirs[kind].get(name), _typical(mine[kind]))


def _size(
    step: int, kind: str, name: str, mine: Tensor | None, theirs: Tensor | None, typical: float
) -> Size:
    facts: dict[str, Any] = {"step": step, "kind": kind, "name": name}
    if mine is None or theirs is None or mine.shape != theirs.shape:
        return Size(**facts, relative=math.inf, absolute=math.inf)
    left, right = mine.double(), theirs.double()
    absolute = float((left - right).abs().max()) if left.numel() else 0.0
    if math.isnan(absolute):
        absolute = math.inf
    scale = max(float(left.abs().max()) if left.numel() else 0.0, typical)
    return Size(**facts, relative=absolute / scale if scale else math.inf, absolute=absolute)


def _typical(tensors: Mapping[str, Tensor]) -> float:
    """Give the root mean square of all floating-point values."""
    floating = [tensor.double() for tensor in tensors.values() if tensor.is_floating_point()]
    count = sum(tensor.numel() for tensor in floating)
    return math.sqrt(sum(float(tensor.square().sum()) for tensor in floating) / count) if count else 0.0
