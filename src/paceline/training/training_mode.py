"""Puts the model that a task makes into training mode, as every textbook loop does before its first step."""

from __future__ import annotations

from torch import nn

WHOLE = (
    "the model came in evaluation mode, as from_pretrained leaves it, and was put into training mode: dropout and BatchNorm "
    "train. A part that is to stay as it is says so in a train() of its own."
)


def enter_training_mode(model: nn.Module) -> str:
    """Call `train()` on a model in evaluation mode, else on the modules with a `train` of their own; return what to tell.

    What a task has frozen by `model.bn.eval()` in a model that trains stays frozen.
    """
    if not model.training:
        model.train()
        return WHOLE
    for module in model.modules():
        if module.training and type(module).train is not nn.Module.train:
            module.train()
    for name, module in model.named_modules():
        if not module.training and _trains(module):
            return (
                f"{name} came in evaluation mode, as from_pretrained leaves it, and stays so, though it has weights that train: "
                "its dropout and BatchNorm do not. Call train() on the model in model() where they should."
            )
    return ""


def _trains(module: nn.Module) -> bool:
    """Return whether it is a body of layers with weights that train; a layer alone is frozen on purpose."""
    return next(module.children(), None) is not None and any(one.requires_grad for one in module.parameters())
