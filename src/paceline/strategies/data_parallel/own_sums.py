"""Memory for summed gradients that somebody may keep: torch's reducer writes the next ones where these lay.

The exchange leaves its totals here instead of in the reducer's buckets, so nothing is copied. What nobody has kept is written
to again in the next step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.compat.storage import holders, other_storage


class _Flat:
    """Memory for the totals of one bucket."""

    def __init__(self, bucket: Tensor) -> None:
        self.flat = torch.empty_like(bucket)
        self.target = other_storage(self.flat)
        """The same memory, for an exchange to write to: what it holds of that does not count."""
        self._alone = holders(self.flat)

    def fits(self, bucket: Tensor) -> bool:
        """Return whether a bucket's totals may go here: nobody has kept what did so before."""
        flat = self.flat
        return flat.shape == bucket.shape and flat.dtype == bucket.dtype and holders(flat) == self._alone


class OwnSums:
    """Memory for the totals of each bucket of one reducer."""

    def __init__(self) -> None:
        self._flats: dict[int, _Flat] = {}
        self._placed: dict[int, tuple[_Flat, int]] = {}
        """Those of this step, by the memory of the bucket, and where the bucket begins in that."""

    def begin(self) -> None:
        """Start a step, in which buckets may lie elsewhere."""
        self._placed = {}

    def target(self, index: int, bucket: Tensor) -> Tensor:
        """Return memory for a bucket's totals that nobody else holds."""
        flat = self._flats.get(index)
        if flat is None or not flat.fits(bucket):
            flat = self._flats[index] = _Flat(bucket)
        self._placed[bucket.untyped_storage().data_ptr()] = flat, int(bucket.storage_offset())
        return flat.target

    def total(self, gradient: Tensor) -> Tensor:
        """Return what a gradient that lies in a bucket has come to, in memory which the reducer does not write to."""
        strided = gradient.layout is torch.strided
        placed = self._placed.get(gradient.untyped_storage().data_ptr()) if strided else None
        if placed is None:
            return gradient.clone()
        flat, start = placed[0].flat, placed[1]
        if gradient.is_complex():
            flat, start = torch.view_as_complex(flat.view(-1, 2)), start // 2
        place = gradient.storage_offset() - start
        # No view: each counts by itself how often it was written to.
        return gradient.new_empty(0).set_(flat.untyped_storage(), place, gradient.shape, gradient.stride())
