"""Refuses modules of TorchScript where weights are taken out of them, or hooks put on them: they allow neither."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from paceline.errors import InputError


def refuse_scripted(modules: Iterable[tuple[str, nn.Module]], strategy: str, what: str) -> None:
    """Raise for the first of some named modules that torch.jit has compiled and that holds parameters."""
    for name, module in modules:
        if isinstance(module, torch.jit.ScriptModule) and next(module.parameters(), None) is not None:
            raise InputError(
                f"{name or 'the model'} comes from torch.jit.script or torch.jit.trace, and {strategy} cannot {what}. Use "
                "--strategy ddp, dp or ps, or give the module as Python, as it was before."
            )
