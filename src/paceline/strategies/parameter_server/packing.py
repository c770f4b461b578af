"""Lists of tensors as a few flat ones, for the way between a trainer and a server."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.reduce.packing import refuse_rows
from paceline.reduce.tree import Gradients

Packed = tuple[list[bool], list[Tensor]]
"""Which tensors of a list there are, and their values: one flat tensor for each type, in host memory."""


class Packing:
    """Where each tensor of a list lies in the flat ones: the same on both ends, in the memory layout of `like`."""

    def __init__(self, like: Sequence[Tensor]) -> None:
        # A tensor of its own, because one that is a part of another may lie there with gaps.
        made = [torch.empty_like(one, device="meta") for one in like]
        self._forms = [(one.shape, one.stride(), one.numel(), one.dtype) for one in made]

    def pack(self, held: Gradients) -> Packed:
        """Return a list as flat tensors; None stays None."""
        refuse_rows(held, "ps")
        present = [one is not None for one in held]
        device = next((one.device for one in held if one is not None), torch.device("cpu"))
        sizes = self._sizes(present)
        flats = {dtype: torch.empty(size, dtype=dtype, device=device) for dtype, size in sizes.items()}
        for one, view in zip(held, self._views(present, flats), strict=True):
            if one is not None and view is not None:
                view.copy_(one)
        return present, [flat.cpu() for flat in flats.values()]

    def unpack(self, packed: Packed, device: torch.device) -> Gradients:
        """Return the list: its tensors are views of the flat ones where those are on the device."""
        present, values = packed
        flats = dict(zip(self._sizes(present), (one.to(device) for one in values), strict=True))
        return self._views(present, flats)

    def _sizes(self, present: Sequence[bool]) -> dict[torch.dtype, int]:
        sizes: dict[torch.dtype, int] = {}
        for there, (_, _, numel, dtype) in zip(present, self._forms, strict=True):
            if there:
                sizes[dtype] = sizes.get(dtype, 0) + numel
        return sizes

    def _views(self, present: Sequence[bool], flats: dict[torch.dtype, Tensor]) -> Gradients:
        starts = {dtype: int(flat.storage_offset()) for dtype, flat in flats.items()}
        views: Gradients = []
        for there, (shape, stride, numel, dtype) in zip(present, self._forms, strict=True):
            if not there:
                views.append(None)
                continue
            views.append(flats[dtype].as_strided(shape, stride, starts[dtype]))
            starts[dtype] += numel
        return views
