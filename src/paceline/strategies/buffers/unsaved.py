"""Buffers that `state_dict` leaves out (persistent=False) and that a run changes: a run that is resumed needs them too."""

from __future__ import annotations

from collections.abc import Mapping
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from paceline.compat.modules import unsaved_buffers_of
from paceline.strategies.guards.writes import checksum

_made: WeakKeyDictionary[nn.Module, dict[str, int]] = WeakKeyDictionary()
"""What they held when the model was made; a group that forms anew goes on with the same model."""


def unsaved(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that no `state_dict` holds, by name."""
    return {
        f"{path}.{name}".lstrip("."): value
        for path, module in model.named_modules()
        for name, value in module.named_buffers(recurse=False)
        if name in unsaved_buffers_of(module)
    }


def note_unsaved(model: nn.Module) -> None:
    """Remember what they hold as what `model()` makes."""
    if model not in _made:
        _made[model] = {name: checksum(value) for name, value in unsaved(model).items()}


def moved_unsaved(model: nn.Module) -> dict[str, Tensor]:
    """Return those that hold something else now."""
    before = _made.get(model, {})
    return {
        name: value.detach()
        for name, value in unsaved(model).items()
        if name in before and checksum(value) != before[name]
    }


@torch.no_grad()
def put_unsaved(model: nn.Module, held: Mapping[str, Tensor]) -> None:
    """Load what `moved_unsaved` gave."""
    here = unsaved(model)
    for name, value in held.items():
        if name in here and here[name].shape == value.shape:
            here[name].copy_(value)
