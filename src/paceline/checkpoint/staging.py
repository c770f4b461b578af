"""Copies of tensors in host memory, so that training can change its own while they are written."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from paceline.compat import foreach

SLAB = 256 << 20
"""Bytes that are asked for at once; torch rounds pinned memory up to a power of two, and this is one."""
_ALIGNMENT = 64


class Staging:
    """Memory that is taken once and used for every save; pinned where the tensors are on an accelerator."""

    def __init__(self) -> None:
        self._slabs: list[Tensor] = []
        self._layout: list[tuple[str, torch.Size, torch.dtype, bool]] = []
        self._places: list[Tensor] = []

    def copies(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy tensors here, none over another; what was copied before is overwritten."""
        pinned = any(tensor.device.type == "cuda" for tensor in tensors.values())
        layout = [(key, tensor.shape, tensor.dtype, pinned) for key, tensor in tensors.items()]
        if layout != self._layout:
            # From save to save it is the same, and laying out hundreds of small tensors takes longer than copying them.
            self._layout, self._places = layout, self._laid_out(tensors, pinned=pinned)
        if tensors:
            foreach.copy_(self._places, list(tensors.values()), non_blocking=True)
        if pinned:
            torch.cuda.current_stream().synchronize()
        return dict(zip(tensors, self._places, strict=True))

    def _laid_out(self, tensors: Mapping[str, Tensor], *, pinned: bool) -> list[Tensor]:
        """Return a place for each tensor in the slabs."""
        needed = sum(_room(tensor) for tensor in tensors.values())
        places: list[Tensor] = []
        slab, start = 0, 0
        for tensor in tensors.values():
            while slab < len(self._slabs) and start + _room(tensor) > len(self._slabs[slab]):
                slab, start = slab + 1, 0
            if slab == len(self._slabs):
                size = max(_room(tensor), min(SLAB, needed))
                self._slabs.append(torch.empty(size, dtype=torch.uint8, pin_memory=pinned))
            end = start + tensor.numel() * tensor.element_size()
            places.append(self._slabs[slab][start:end].view(tensor.dtype).view(tensor.shape))
            start += _room(tensor)
            needed -= _room(tensor)
        return places


def _room(tensor: Tensor) -> int:
    """Return a tensor's bytes, up to the next place where any type may begin."""
    return -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
