"""How large a difference is, from the tensors that two runs wrote down."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from paceline.verify.bounds import Size


def measure(step: int, reference: Path, candidate: Path) -> list[Size]:
    """Compare two dumps of the same step: the difference of each kind that has one."""
    mine, theirs = (
        torch.load(path, map_location="cpu", weights_only=True) for path in (reference, candidate)
    )
    found = [
        size
        for kind in ("gradient", "weight", "buffer")
        if (size := whole(step, kind, mine[kind], theirs[kind])) is not None
    ]
    gap = abs(mine["loss"] - theirs["loss"])
    if gap:
        relative = gap / abs(mine["loss"]) if mine["loss"] else math.inf
        found.append(
            Size(step=step, kind="loss", name="of the global batch", relative=relative, absolute=gap)
        )
    return found


def whole(step: int, kind: str, mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> Size | None:
    """Compare all tensors of a kind as one vector: the length of the difference over the length of the reference's.

    None where there is none. The name is that of the tensor which has the largest part in it.
    """
    parts = {name: _squares(mine.get(name), theirs.get(name)) for name in {**mine, **theirs}}
    apart = sum(part[0] for part in parts.values())
    if not apart:
        return None
    length = sum(part[1] for part in parts.values())
    return Size(
        step=step,
        kind=kind,
        name=max(parts, key=lambda name: parts[name][0]),
        relative=math.sqrt(apart / length) if length and math.isfinite(apart) else math.inf,
        absolute=max(part[2] for part in parts.values()),
    )


def of_tensor(step: int, kind: str, name: str, reference: Path, candidate: Path) -> Size | None:
    """Give the difference of one named tensor in two dumps; None where they do not hold it."""
    mine, theirs = (
        torch.load(path, map_location="cpu", weights_only=True) for path in (reference, candidate)
    )
    if not isinstance(mine.get(kind), dict) or name not in mine[kind]:
        return None
    one, other = ({name: held[kind][name]} if name in held[kind] else {} for held in (mine, theirs))
    return whole(step, kind, one, other)


def _squares(mine: Tensor | None, theirs: Tensor | None) -> tuple[float, float, float]:
    """Give the squared length of the difference and of the reference, and the largest single difference."""
    if mine is None or theirs is None or mine.shape != theirs.shape:
        return math.inf, 0.0, math.inf
    left, right = mine.double(), theirs.double()
    gap = left - right
    apart = float(gap.square().sum())
    largest = float(gap.abs().max()) if gap.numel() else 0.0
    return (math.inf if math.isnan(apart) else apart), float(left.square().sum()), largest
