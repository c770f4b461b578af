"""Hands one worker's state to all others: tensors as bytes in large chunks, the rest as one small message."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.state.packing import bunches, packed_size, packed_views
from paceline.world import World, broadcast_object

CHUNK_BYTES = 64 << 20
"""Bytes sent at once."""


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
    def layout(self) -> tuple[torch.Size, torch.dtype]:
        """Return what its place in a buffer depends on."""
        return self.shape, self.dtype


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
        for chunk in bunches(places, lambda place: packed_size([metas[place].layout]), CHUNK_BYTES):
            received |= _send_chunk(world, chunk, metas, tensors, source, device)
    return _with_tensors(skeleton, received)


def _send_chunk(
    world: World,
    chunk: list[int],
    metas: list[_TensorMeta],
    tensors: list[Tensor],
    source: int,
    device: torch.device,
) -> dict[int, Tensor]:
    layout = [metas[place].layout for place in chunk]
    buffer = torch.empty(packed_size(layout), dtype=torch.uint8, device=device)
    if world.rank == source:
        for place, view in zip(chunk, packed_views(buffer, layout), strict=True):
            view.copy_(tensors[place].detach())
    received = world.comm.broadcast(buffer, source)
    return dict(zip(chunk, packed_views(received, layout), strict=True))


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
