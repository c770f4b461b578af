"""Activation checkpointing of both kinds, and hooks wherever torch has them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.zoo.exhibits import exhibit
from tests.zoo.tasks.base import CLASSES, FEATURES, Small


class _Recomputed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first, self.head = nn.Linear(FEATURES, 16), nn.Linear(16, CLASSES)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.3)) for _ in range(2)
        )

    def forward(self, features: Tensor) -> Tensor:
        made = self.first(features)
        for block in self.blocks:
            made = checkpoint(block, made, use_reentrant=self.reentrant)
        scores: Tensor = self.head(made)
        return scores


@exhibit("recomputed", "activation checkpointing, `use_reentrant=False`")
class Recomputed(Small):
    """Dropout must be the same the second time."""

    def model(self) -> nn.Module:
        return _Recomputed(reentrant=False)


@exhibit(
    "recomputed-reentrant",
    "activation checkpointing, `use_reentrant=True`",
    {"pp": "a stage begins inside"},
)
class RecomputedReentrant(Small):
    """A backward pass in the backward pass."""

    def model(self) -> nn.Module:
        return _Recomputed(reentrant=True)


def _halve(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output * 0.5


def _louder(module: nn.Module, given: Any, made: Any) -> Any:
    return tuple(None if one is None else one * 1.5 for one in given)


@exhibit("module-hooks", "hooks on modules, forward and backward")
class ModuleHooks(Small):
    """They change what goes through."""

    def model(self) -> nn.Module:
        made = super().model()
        made[0].register_forward_hook(_halve)
        made[1].register_full_backward_hook(_louder)
        return made


HOOKED = dict.fromkeys(("fsdp", "tp"), "has a hook (register_hook)")


@exhibit("gradient-hooks", "hooks on the gradients of parameters (`Tensor.register_hook`)", HOOKED)
class GradientHooks(Small):
    """One gradient is halved, another is cut."""

    def model(self) -> nn.Module:
        made = super().model()
        made[0].weight.register_hook(lambda gradient: gradient * 0.5)
        made[3].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        return made


def _shrink(parameter: Tensor) -> None:
    parameter.grad.mul_(0.5)


@exhibit(
    "accumulation-hooks",
    "`register_post_accumulate_grad_hook`",
    {"*": "a hook of register_post_accumulate_grad_hook"},
)
class AccumulationHooks(Small):
    """What is called when a gradient has been added up."""

    def model(self) -> nn.Module:
        made = super().model()
        made[0].weight.register_post_accumulate_grad_hook(_shrink)
        return made


@exhibit("optimizer-hooks", "hooks on the steps of an optimizer that say `elementwise = True`")
class OptimizerHooks(Small):
    """Weights are kept small after each step."""

    def optimizer(self, model: nn.Module) -> Any:
        made = super().optimizer(model)

        def clamp(optimizer: Any, arguments: Any, options: Any) -> None:
            with torch.no_grad():
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.clamp_(-0.3, 0.3)

        clamp.elementwise = True  # type: ignore[attr-defined]
        made.register_step_post_hook(clamp)
        return made
