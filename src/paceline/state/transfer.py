"""Hands one worker's state to all others: tensors as bytes in large chunks, the rest as one small message."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.world import World, broadcast_object

CHUNK_BYTES = 64 << 20
"""Bytes sent at once."""
_ALIGNMENT = 16


@dataclass(frozen=True)
class _Place:
    """Where a tensor was, in the value that travels without its tensors."""

    index: int


@dataclass(frozen=True)
class _TensorMeta:
    shape: torch.Size
    dtype: torch.dtype
    on_device: bool

    @property
    def length(self) -> int:
        """Return its bytes, up to the next place where any type may begin."""
        size = self.shape.numel() * self.dtype.itemsize
        return -(-size // _ALIGNMENT) * _ALIGNMENT


def broadcast_state(world: World, state: Any, source: int) -> Any:
    """Return the source's value on every worker: dicts and lists of tensors, numbers and text."""
    tensors: list[Tensor] = []
    sent: Any = None
    if world.rank == source:
        skeleton = _without_tensors(state, tensors)
        sent = skeleton, [_TensorMeta(each.shape, each.dtype, each.device.type != "cpu") for each in tensors]
    skeleton, metas = broadcast_object(world.comm, sent, source)
    received: dict[int, Tensor] = {}
    for on_device in (False, True):
        device = world.device if on_device else torch.device("cpu")
        places = [place for place, meta in enumerate(metas) if meta.on_device == on_device]
        for chunk in _chunks(places, metas):
            received |= _send_chunk(world, chunk, metas, tensors, source, device)
    return _with_tensors(skeleton, received)


def _chunks(places: list[int], metas: list[_TensorMeta]) -> list[list[int]]:
    """Put tensors together into chunks; a large one travels alone."""
    chunks: list[list[int]] = []
    size = CHUNK_BYTES
    for place in places:
        if size + metas[place].length > CHUNK_BYTES:
            chunks.append([])
            size = 0
        chunks[-1].append(place)
        size += metas[place].length
    return chunks


def _send_chunk(
    world: World,
    chunk: list[int],
    metas: list[_TensorMeta],
    tensors: list[Tensor],
    source: int,
    device: torch.device,
) -> dict[int, Tensor]:
    buffer = torch.empty(sum(metas[place].length for place in chunk), dtype=torch.uint8, device=device)
    if world.rank == source:
        for place, view in _views(buffer, chunk, metas).items():
            view.copy_(tensors[place].detach())
    return _views(world.comm.broadcast(buffer, source), chunk, metas)


def _views(buffer: Tensor, chunk: list[int], metas: list[_TensorMeta]) -> dict[int, Tensor]:
    """Return views of the tensors in a chunk's buffer."""
    views: dict[int, Tensor] = {}
    start = 0
    for place in chunk:
        meta = metas[place]
        size = meta.shape.numel() * meta.dtype.itemsize
        views[place] = buffer[start : start + size].view(meta.dtype).view(meta.shape)
        start += meta.length
    return views


def _without_tensors(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value)
        return _Place(len(tensors) - 1)
    if isinstance(value, dict):
        return {key: _without_tensors(item, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_without_tensors(item, tensors) for item in value)
    return value


def _with_tensors(value: Any, tensors: dict[int, Tensor]) -> Any:
    if isinstance(value, _Place):
        return tensors[value.index]
    if isinstance(value, dict):
        return {key: _with_tensors(item, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_with_tensors(item, tensors) for item in value)
    return value
