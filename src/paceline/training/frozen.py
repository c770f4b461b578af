"""What does not train: saved with a run and told to a worker that joins, because a loop may free it at some step."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

KEY = "frozen"
"""Where a checkpoint's facts and a handover hold the names."""


def frozen_names(model: nn.Module) -> list[str]:
    """Return the parameters that require no gradients."""
    return [name for name, parameter in model.named_parameters() if not parameter.requires_grad]


def freeze_as(model: nn.Module, names: Collection[str]) -> list[str]:
    """Freeze exactly these parameters, and return the names whose `requires_grad` changed."""
    changed = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad == (name in names):
            parameter.requires_grad_(name not in names)
            changed.append(name)
    return changed
