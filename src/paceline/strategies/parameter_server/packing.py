"""Lists of tensors as a few flat ones in host memory, for the way between a trainer and a server."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.reduce import packing
from paceline.reduce.tree import Gradients


class HostPacking:
    """Where each tensor of a list lies in the flat ones: the same on both ends, in the memory layout of `like`."""

    def __init__(self, like: Sequence[Tensor]) -> None:
        self._packing = packing.Packing(like) if like else None  # a server may have no parameter at all
        self._doubtful = [True] * len(like)

    def pack(self, held: Gradients) -> list[Tensor]:
        """Return a list as flat tensors; None stays None."""
        packing.refuse_rows(held, "ps")
        return [] if self._packing is None else [flat.cpu() for flat in self._packing.pack(held)]

    def unpack(self, flats: Sequence[Tensor], device: torch.device) -> Gradients:
        """Return the list: its tensors may be views of the flat ones."""
        placed = [flat.to(device) for flat in flats]
        return [] if self._packing is None else self._packing.unpack(placed, self._doubtful)
