"""The state of a run whose parameters lie on servers: what each worker knows of it, and how it comes together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from paceline.errors import InputError
from paceline.state.chunks import MODEL, OPTIMIZER
from paceline.strategies.base import StrategyInputs
from paceline.world import World


@torch.no_grad()
def agree_on_weights(model: nn.Module, inputs: StrategyInputs, world: World) -> None:
    """Begin with the first worker's weights, where nobody knows yet that all have the same."""
    if not inputs.weights_in_sync:
        for value in model.state_dict().values():
            if isinstance(value, torch.Tensor):
                value.copy_(world.comm.broadcast(value, 0))


def rest_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is no tensor of a state: groups, schedule."""
    rest = {key: value for key, value in state.items() if key not in (MODEL, OPTIMIZER)}
    return {**rest, OPTIMIZER: {**state[OPTIMIZER], "state": {}}}


def check_slots(slots: Mapping[str, Mapping[str, Any]], kind: str) -> None:
    """Refuse an optimizer whose state cannot be gathered again."""
    for name, held in slots.items():
        for slot, value in held.items():
            if not isinstance(value, torch.Tensor):
                raise InputError(
                    f"--strategy ps keeps tensors on its servers, but {kind} keeps {slot} = {value!r:.40} for {name}. "
                    "Use --strategy ddp."
                )
