"""Puts the model that a task makes into training mode, as every textbook loop does before its first step."""

from __future__ import annotations

from torch import nn

EVALUATING = (
    "the model came in evaluation mode, as from_pretrained leaves it, and was put into training mode: dropout and BatchNorm "
    "train. A part that is to stay as it is says so in a train() of its own."
)


def enter_training_mode(model: nn.Module) -> bool:
    """Call `train()` on a model in evaluation mode, else on the modules with a `train` of their own; return whether on the first.

    What a task has frozen by `model.bn.eval()` in a model that trains stays frozen.
    """
    if not model.training:
        model.train()
        return True
    for module in model.modules():
        if module.training and type(module).train is not nn.Module.train:
            module.train()
    return False
