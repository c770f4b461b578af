"""Mixed precision for a loop that calls the model itself: the type is switched at the model's door."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from paceline.compat import pytree
from paceline.strategies.precision import Precision

_MARK = "_paceline_autocast"


def autocast_forward(model: nn.Module, precision: Precision) -> None:
    """Make the model's forward pass compute in `precision` and hand out fp32, so that a loss outside stays exact."""
    if vars(model).get(_MARK):
        return
    vars(model)[_MARK] = True  # beside the hooks: a module that gets other contents has neither
    open_contexts: list[contextlib.AbstractContextManager[object]] = []

    def enter(_: nn.Module, __: Any) -> None:
        context = precision.autocast()
        context.__enter__()
        open_contexts.append(context)

    def leave(_: nn.Module, __: Any, output: Any) -> Any:
        open_contexts.pop().__exit__(None, None, None)
        return pytree.tree_map_only(torch.Tensor, _widen, output)

    model.register_forward_pre_hook(enter)
    model.register_forward_hook(leave, always_call=True)


def _widen(value: torch.Tensor) -> torch.Tensor:
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
