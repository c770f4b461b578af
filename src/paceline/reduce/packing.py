"""Lists of gradients as flat tensors, one for each type, so that they travel as they were: what is missing stays missing.

Beside the numbers goes a flag for each gradient. A sum of flags above zero says that somebody had one; where nobody had,
there is none afterwards either, and weight decay and momentum leave the parameter alone as they do in one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.errors import InputError
from paceline.reduce.tree import Gradients


def nothing_like(like: Tensor) -> Tensor:
    """Return what adds nothing to anything: -0.0, because 0.0 would turn a -0.0 into 0.0."""
    made = torch.empty_like(like)
    as_real(made).fill_(-0.0)
    return made


def as_real(tensor: Tensor) -> Tensor:
    """Return the same memory as real numbers; a complex number is two of them."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def dense_strides(like: Tensor) -> tuple[int, ...]:
    """Return the strides that torch gives a gradient: the parameter's own where it fills its memory, else contiguous ones."""
    return like.stride() if _fills(like) else torch.empty(like.shape, device="meta").stride()


def memory_shape(tensor: Tensor) -> torch.Size:
    """Return the sides of a dense tensor in the order in which they lie in memory, the outermost first."""
    if tensor.is_contiguous():
        return tensor.shape
    sides = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return torch.Size(tensor.shape[side] for side in sides)


def _fills(tensor: Tensor) -> bool:
    """Return whether a tensor has every number of a stretch of memory once, in any order."""
    length = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != length:
                return False
            length *= size
    return True


def _laid_out(gradient: Tensor, like: Tensor) -> Tensor:
    """Return a gradient in the order of memory that torch gives it: a norm adds in that order."""
    made = torch.empty_strided(like.shape, dense_strides(like), dtype=gradient.dtype, device=gradient.device)
    return made.copy_(gradient)


class Packing:
    """Where each gradient of a list lies in the flat tensors."""

    def __init__(self, like: Sequence[Tensor]) -> None:
        self._like = list(like)
        self._spans: list[tuple[torch.dtype, int, int]] = []
        self._lengths: dict[torch.dtype, int] = {torch.float32: 0}
        for one in self._like:
            real = as_real(one)
            start = self._lengths.setdefault(real.dtype, 0)
            self._lengths[real.dtype] = start + real.numel()
            self._spans.append((real.dtype, start, start + real.numel()))
        self._flags = self._lengths[torch.float32]
        self._lengths[torch.float32] += len(self._like)
        self._device = self._like[0].device

    def pack(self, gradients: Gradients) -> list[Tensor]:
        """Return the list as flat tensors; an empty list has no gradient at all."""
        made = {
            dtype: torch.full((length,), -0.0, dtype=dtype, device=self._device)
            for dtype, length in self._lengths.items()
        }
        for place, gradient in enumerate(gradients):
            if gradient is not None:
                dtype, start, stop = self._spans[place]
                real = as_real(gradient)
                made[dtype][start:stop].view(real.shape).copy_(real)
        if gradients:
            # Made on the host and sent in one message: a write for each flag would be a kernel for each.
            there = torch.tensor([-0.0 if one is None else 1.0 for one in gradients])
            made[torch.float32][self._flags :] = there.to(self._device, non_blocking=True)
        return list(made.values())

    def unpack(self, flat: Sequence[Tensor], doubtful: Sequence[bool]) -> Gradients:
        """Return the list that sums of flat tensors stand for; what is doubtful and nobody had is missing.

        Only then are the flags read, for which a GPU is waited for. What nobody had and is not asked about comes as -0.0.
        """
        whole: dict[Any, Tensor] = {one.dtype: one for one in flat}
        there = whole[torch.float32][self._flags :].tolist() if any(doubtful) else [1.0] * len(self._like)
        found: Gradients = []
        for place, (like, (dtype, start, stop)) in enumerate(zip(self._like, self._spans, strict=True)):
            real = whole[dtype][start:stop].view(as_real(like).shape)
            missing = doubtful[place] and not there[place] > 0
            one = torch.view_as_complex(real) if like.is_complex() else real
            found.append(None if missing else one if like.is_contiguous() else _laid_out(one, like))
        return found


def refuse_rows(gradients: Iterable[Tensor | None], strategy: str) -> None:
    """Raise for gradients that turn out to be a few rows, as those of F.embedding(..., sparse=True) are."""
    if any(one is not None and one.layout is not torch.strided for one in gradients):
        raise InputError(
            f"a gradient of the model is sparse (F.embedding(..., sparse=True)?), but --strategy {strategy} adds up whole "
            "gradients. Use nn.Embedding(sparse=True) with --strategy hybrid or ddp, or leave sparse=True out."
        )
