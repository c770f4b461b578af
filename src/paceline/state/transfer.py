"""Hands one worker's state to all others: tensors as bytes in large pieces, the rest as one small message."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.world import World, broadcast_object

PIECE = 64 << 20
"""Bytes sent at once."""
_ALIGNMENT = 16


@dataclass(frozen=True)
class _Place:
    """Where a tensor was, in the value that travels without its tensors."""

    index: int


@dataclass(frozen=True)
class _Form:
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
        sent = skeleton, [_Form(each.shape, each.dtype, each.device.type != "cpu") for each in tensors]
    skeleton, forms = broadcast_object(world.comm, sent, source)
    received: dict[int, Tensor] = {}
    for on_device in (False, True):
        device = world.device if on_device else torch.device("cpu")
        places = [place for place, form in enumerate(forms) if form.on_device == on_device]
        for piece in _pieces(places, forms):
            received |= _send_piece(world, piece, forms, tensors, source, device)
    return _with_tensors(skeleton, received)


def _pieces(places: list[int], forms: list[_Form]) -> list[list[int]]:
    """Put tensors together into pieces; a large one travels alone."""
    pieces: list[list[int]] = []
    size = PIECE
    for place in places:
        if size + forms[place].length > PIECE:
            pieces.append([])
            size = 0
        pieces[-1].append(place)
        size += forms[place].length
    return pieces


def _send_piece(
    world: World,
    piece: list[int],
    forms: list[_Form],
    tensors: list[Tensor],
    source: int,
    device: torch.device,
) -> dict[int, Tensor]:
    room = torch.empty(sum(forms[place].length for place in piece), dtype=torch.uint8, device=device)
    if world.rank == source:
        for place, view in _views(room, piece, forms).items():
            view.copy_(tensors[place].detach())
    return _views(world.comm.broadcast(room, source), piece, forms)


def _views(room: Tensor, piece: list[int], forms: list[_Form]) -> dict[int, Tensor]:
    """Cut the room of a piece into its tensors."""
    views: dict[int, Tensor] = {}
    start = 0
    for place in piece:
        form = forms[place]
        size = form.shape.numel() * form.dtype.itemsize
        views[place] = room[start : start + size].view(form.dtype).view(form.shape)
        start += form.length
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
