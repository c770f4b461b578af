"""How large a difference is, from the tensors that two runs wrote down."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.verify.proof.bounds import Size


def load(path: Path) -> dict[str, Any]:
    """Return what a run wrote down of a step."""
    held: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return held


def measure(step: int, reference: Path, candidate: Path) -> list[Size]:
    """Compare two dumps of the same step: the difference of each kind that has one."""
    mine, theirs = load(reference), load(candidate)
    found = [
        size
        for kind in ("gradient", "weight", "buffer")
        if (size := whole(step, kind, mine[kind], theirs[kind])) is not None
    ]
    loss = of_number(step, "loss", "of the global batch", mine["loss"], theirs["loss"])
    return found if loss is None else [*found, loss]


def of_number(step: int, kind: str, name: str, mine: float, theirs: float) -> Size | None:
    """Return the difference of two numbers; None where they are the same one."""
    one, other = ({name: torch.tensor(value, dtype=torch.float64)} for value in (mine, theirs))
    return whole(step, kind, one, other)


def whole(step: int, kind: str, mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> Size | None:
    """Compare all tensors of a kind as one vector: the length of the difference over the length of the reference's.

    None where there is none. The name is that of the tensor which has the largest part in it.
    """
    parts = {
        name: _squares(*_filled(kind, mine.get(name), theirs.get(name)))
        for name in sorted({**mine, **theirs})
    }
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


def moved(reference: Path, candidate: Path) -> float:
    """Return how many times as far as the reference's a candidate's weights have moved from their start."""
    lengths = []
    for path in (reference, candidate):
        held = load(path)
        start = {name: held["starting weight"][name] for name in held["weight"]}
        pairs = [
            _squares(torch.zeros_like(start[name]), held["weight"][name] - start[name]) for name in start
        ]
        lengths.append(math.sqrt(sum(pair[0] for pair in pairs)))
    return lengths[1] / lengths[0] if lengths[0] else (math.inf if lengths[1] else 1.0)


def of_tensor(step: int, kind: str, name: str, reference: Path, candidate: Path) -> Size | None:
    """Return the difference of one named tensor in two dumps; None where they do not hold it."""
    mine, theirs = load(reference), load(candidate)
    if not isinstance(mine.get(kind), dict) or name not in mine[kind]:
        return None
    one, other = ({name: held[kind][name]} if name in held[kind] else {} for held in (mine, theirs))
    return whole(step, kind, one, other)


def _filled(kind: str, mine: Tensor | None, theirs: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Put zeros where one side has no gradient: what an update makes of the two is compared by the weights."""
    if kind != "gradient":
        return mine, theirs
    return (
        torch.zeros_like(theirs) if mine is None and theirs is not None else mine,
        torch.zeros_like(mine) if theirs is None and mine is not None else theirs,
    )


def _squares(mine: Tensor | None, theirs: Tensor | None) -> tuple[float, float, float]:
    """Return the squared length of the difference and of the reference, and the largest single difference.

    What is the same bits counts as the same: infinities of a mask, and values that are no numbers. A length is that
    of the finite values, and of no whole numbers: a counter in the millions would hide every difference beside it.
    """
    if mine is None or theirs is None or mine.shape != theirs.shape or _family(mine) != _family(theirs):
        return math.inf, 0.0, math.inf
    left, right = (
        torch.view_as_real(one.resolve_conj()) if one.is_complex() else one for one in (mine, theirs)
    )
    apart = (left != right) & ~(left.isnan() & right.isnan())
    gap = torch.where(apart, left.double() - right.double(), 0.0)
    largest = float(gap.abs().max()) if gap.numel() else 0.0
    if not left.is_floating_point():
        return (math.inf if bool(apart.any()) else 0.0), 0.0, largest
    squared = float(gap.square().sum())
    if not math.isfinite(squared):
        return math.inf, 0.0, math.inf
    return squared, float(torch.nan_to_num(left.double(), 0.0, 0.0, 0.0).square().sum()), largest


def _family(tensor: Tensor) -> str:
    """Return what kind of number a tensor holds, whatever its precision."""
    if tensor.is_complex():
        return "complex"
    return "real" if tensor.is_floating_point() else str(tensor.dtype)
