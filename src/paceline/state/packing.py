"""Several tensors in one buffer of bytes, each at a place where any type may begin."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

Item = TypeVar("Item")
_ALIGNMENT = 16
Layout = Iterable[tuple[Sequence[int], torch.dtype]]
"""The shapes and types of tensors, in the order in which they lie in the buffer."""


def bunches(items: Iterable[Item], size: Callable[[Item], int], most: float) -> Iterator[list[Item]]:
    """Yield neighbours together, as many as have no more than `most` bytes; a larger one comes alone."""
    bunch: list[Item] = []
    held = 0
    for item in items:
        held += size(item)
        if bunch and held > most:
            yield bunch
            bunch, held = [], size(item)
        bunch.append(item)
    if bunch:
        yield bunch


def packed_size(layout: Layout) -> int:
    """Return the bytes of a buffer that holds such tensors."""
    return sum(-(-_size(shape, dtype) // _ALIGNMENT) * _ALIGNMENT for shape, dtype in layout)


def packed_views(buffer: Tensor, layout: Layout) -> Iterator[Tensor]:
    """Return views of the tensors in a buffer."""
    start = 0
    for shape, dtype in layout:
        yield buffer[start : start + _size(shape, dtype)].view(dtype).view(torch.Size(shape))
        start += packed_size([(shape, dtype)])


def _size(shape: Sequence[int], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize
