"""A `TensorDataset` small enough to lie on the GPU: its batches are gathered there, and the CPU sends the order alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from paceline.compat.tensors import write_count
from paceline.data.permutation import Indices

LARGEST = 256 << 20
"""Bytes of a data set that is kept on the device: the copy of each epoch takes about 30 ms."""
_SHARE = 32
"""At most this part of the device's memory is taken."""


def fits_on(device: torch.device, tensors: Sequence[Tensor]) -> bool:
    """Return whether a data set of these tensors is kept on a device."""
    if device.type != "cuda" or any(one.device.type != "cpu" for one in tensors):
        return False
    size = sum(one.numel() * one.element_size() for one in tensors)
    total: int = torch.cuda.get_device_properties(device).total_memory
    return size <= min(LARGEST, total // _SHARE)


class Rows:
    """A batch that is still to be gathered, from tensors that stay where they are as long as their data set does."""

    __slots__ = ("copies", "rows")

    def __init__(self, copies: Sequence[Tensor], rows: Tensor) -> None:
        self.copies, self.rows = copies, rows

    def to(self, device: torch.device | str) -> list[Tensor]:
        """Return the batch, a list of tensors as default_collate makes of tuples."""
        return [copy.index_select(0, self.rows).to(device) for copy in self.copies]


def gathered(batches: Sequence[Any]) -> Sequence[Any]:
    """Return batches with those gathered that are rows yet."""
    return [one.to(one.rows.device) if isinstance(one, Rows) else one for one in batches]


class ResidentReader:
    """Reads a `TensorDataset` from a copy on the device; the same values as from the data set itself.

    The copy is made anew in each epoch, and whenever torch has counted a write to the data set since. What is written past
    torch's count, through the memory of a numpy array, is seen from the next epoch on.
    """

    def __init__(self, dataset: TensorDataset, device: torch.device) -> None:
        self._dataset, self._device = dataset, device
        self._epoch: int | None = None
        self._versions: list[tuple[int, int]] = []
        self._copies: list[Tensor] = []
        self._order: Indices | None = None
        self._rows = torch.empty(0)

    def read(self, epoch: int, pieces: Sequence[Indices]) -> list[Any]:
        """Return one batch for each piece, still to be gathered."""
        tensors = self._dataset.tensors
        versions = [(id(one), write_count(one)) for one in tensors]
        if epoch != self._epoch or versions != self._versions:
            self._epoch, self._versions = epoch, versions
            if [_form(one) for one in self._copies] != [_form(one) for one in tensors]:
                self._copies = [torch.empty_like(one, device=self._device) for one in tensors]
            for copy, one in zip(self._copies, tensors, strict=True):
                copy.copy_(one)
        return [Rows(self._copies, self._on_device(piece)) for piece in pieces]

    def _on_device(self, piece: Indices) -> Tensor:
        """Return sample ids on the device; those of many steps lie in one array, which is sent once."""
        order = piece if piece.base is None else piece.base
        if order.ndim != 1 or order.dtype != piece.dtype or not order.flags.c_contiguous:
            return torch.from_numpy(piece).to(self._device)
        if order is not self._order:
            self._order, self._rows = order, torch.from_numpy(order).to(self._device)
        start = (
            piece.__array_interface__["data"][0] - order.__array_interface__["data"][0]
        ) // piece.itemsize
        return self._rows[start : start + len(piece)]


def _form(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype
