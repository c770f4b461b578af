"""Memory for summed gradients, which anybody may keep: torch's reducer writes the next ones where these lay.

The exchange leaves its totals here instead of in the reducer's buckets, so large gradients are not copied. A bucket of which
nobody has kept a part is written to again in the next step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, UntypedStorage

from paceline.compat.storage import holders, other_storage

SMALL = 1 << 16
"""Bytes up to which a gradient is copied: a tensor in the midst of a bucket takes as long to make, and keeps the whole of it."""


class _Flat:
    """Memory for the totals of one bucket."""

    def __init__(self, bucket: Tensor) -> None:
        self.flat = torch.empty_like(bucket)
        self.target = other_storage(self.flat)
        """The same memory, for an exchange to write to: what it holds of that does not count."""
        self._alone = holders(self.flat)

    def fits(self, bucket: Tensor) -> bool:
        """Return whether a bucket's totals may go here: nobody has kept what did so before, or moved it elsewhere."""
        flat = self.flat
        alike = flat.shape == bucket.shape and flat.dtype == bucket.dtype
        return alike and holders(flat) == self._alone and flat.data_ptr() == self.target.data_ptr()


class _Placed(NamedTuple):
    """Where a bucket's totals are in this step."""

    totals: Tensor
    memory: UntypedStorage
    start: int
    """Where the bucket begins in its own memory."""


class OwnSums:
    """Memory for the totals of each bucket of one reducer."""

    def __init__(self) -> None:
        self._flats: dict[int, _Flat] = {}
        self._placed: dict[int, _Placed] = {}
        """By the memory of the bucket."""

    def begin(self) -> None:
        """Start a step, in which buckets may lie elsewhere."""
        self._placed = {}

    def target(self, index: int, bucket: Tensor) -> Tensor:
        """Return memory for a bucket's totals that nobody else holds."""
        flat = self._flats.get(index)
        if flat is None or not flat.fits(bucket):
            flat = self._flats[index] = _Flat(bucket)
        totals, start = flat.target, int(bucket.storage_offset())
        self._placed[bucket.untyped_storage().data_ptr()] = _Placed(
            totals, flat.flat.untyped_storage(), start
        )
        return totals

    def total(self, gradient: Tensor) -> Tensor | None:
        """Return what a gradient has come to, in memory that only this writes to; None of one that lies in no bucket here."""
        strided = gradient.layout is torch.strided
        placed = self._placed.get(gradient.untyped_storage().data_ptr()) if strided else None
        if placed is None:
            return None
        totals, memory, start = placed
        if gradient.is_complex():
            totals, start = torch.view_as_complex(totals.view(-1, 2)), start // 2
        size, stride, place = gradient.shape, gradient.stride(), gradient.storage_offset() - start
        if gradient.nbytes <= SMALL:
            return totals.as_strided(size, stride, place).clone()
        # No view: each counts by itself how often it was written to.
        return gradient.new_empty(0).set_(memory, place, size, stride)
