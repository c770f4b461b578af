"""Refuses backward passes that are to be differentiated themselves, where a strategy's own passes cannot go through them."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from paceline.compat.dispatch import is_differentiated
from paceline.errors import InputError


def refuse_second_order(strategy: str) -> NoReturn:
    """Raise for a gradient that is a part of the loss."""
    raise InputError(
        "the loss takes gradients and learns from them (create_graph=True: a gradient penalty, torch.func.jacrev), and under "
        f"{strategy} no backward pass goes through another. Use --strategy ddp."
    )


def check_order(strategy: str) -> None:
    """Raise inside a backward pass that keeps its graph: there, and only there, torch has gradients enabled."""
    if torch.is_grad_enabled():
        refuse_second_order(strategy)


def check_transforms(strategy: str) -> None:
    """Raise inside a forward pass that torch.func differentiates."""
    if is_differentiated():
        refuse_second_order(strategy)


def watch_order(output: Any, strategy: str) -> None:
    """Refuse second orders through what a layer has made; of a compiled model torch refuses them itself."""
    if isinstance(output, Tensor) and output.requires_grad and not torch.compiler.is_compiling():
        output.register_hook(lambda _: check_order(strategy))  # type: ignore[no-untyped-call]
