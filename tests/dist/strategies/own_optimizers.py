"""Optimizers and hooks of a user's own, some of which look further than what one worker updates."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

Meddle = Callable[[int, nn.Module, Optimizer], None]


class GlobalNorm(Optimizer):
    """Divides by the norm of all gradients."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        held = [one for group in self.param_groups for one in group["params"] if one.grad is not None]
        norm = torch.stack([one.grad.norm() for one in held]).norm()
        for one in held:
            one.sub_(one.grad / norm, alpha=self.param_groups[0]["lr"])


class Clipping(torch.optim.SGD):
    """Torch's update, after a look at everything."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        _max_grad_norm(self)
        super().step()


class Clumped(torch.optim.SGD):
    """Leaves torch's step as it is, and writes what it calls anew."""

    def _init_group(self, group: Any, params: Any, grads: list[Tensor], *rest: Any) -> Any:
        found = super()._init_group(group, params, grads, *rest)  # type: ignore[misc]
        nn.utils.clip_grad_norm_(params, 0.2)
        return found


class _Own(Optimizer):
    """Has a step of its own."""

    def __init__(self, parameters: Any, lr: float = 0.02) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    one.sub_(self.direction(one), alpha=group["lr"])


class Lars(_Own):
    """Looks at one whole parameter at a time, and says so."""

    per_parameter = True

    def direction(self, one: Tensor) -> Tensor:
        return one.grad * (one.norm() / (one.grad.norm() + 1e-3))


class Lion(_Own):
    """Looks at one number at a time, and says so."""

    elementwise = True

    def direction(self, one: Tensor) -> Tensor:
        return one.grad.sign()


class Warm(torch.optim.SGD):
    """Has a constructor of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)


def _max_grad_norm(optimizer: Optimizer, *_: Any) -> None:
    held = [one for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
    nn.utils.clip_grad_norm_(held, 0.2)


def _nothing(*_: Any) -> None:
    """Count, say: a hook of which nobody can know that it looks at nothing."""


def _harmless(*_: Any) -> None:
    """Say of itself that it does not."""


_harmless.elementwise = True  # type: ignore[attr-defined]


def hook_before(number: int, _: nn.Module, optimizer: Optimizer) -> None:
    """Clip from step 1 on."""
    if number == 1:
        optimizer.register_step_pre_hook(_max_grad_norm)


def hook_behind(number: int, _: nn.Module, optimizer: Optimizer) -> None:
    """Look on after the update."""
    if number == 1:
        optimizer.register_step_post_hook(_nothing)


def hook_of_all_before(number: int, _: nn.Module, optimizer: Optimizer) -> None:
    """Clip in all optimizers."""
    del optimizer
    if number == 1:
        GLOBAL.append(register_optimizer_step_pre_hook(_max_grad_norm))


def hook_of_all_behind(number: int, _: nn.Module, optimizer: Optimizer) -> None:
    """Look on after the updates of all."""
    del optimizer
    if number == 1:
        GLOBAL.append(register_optimizer_step_post_hook(_nothing))


def harmless_hook(number: int, _: nn.Module, optimizer: Optimizer) -> None:
    """Put one there that says that it is harmless."""
    if number == 1:
        optimizer.register_step_pre_hook(_harmless)


def patched_step(number: int, _: nn.Module, optimizer: Optimizer) -> None:
    """Put a function that calls itself torch's in the place of the step."""
    if number == 1:
        before = optimizer.step

        @functools.wraps(before)
        def step(*args: Any, **kwargs: Any) -> Any:
            _max_grad_norm(optimizer)
            return before(*args, **kwargs)

        optimizer.step = step  # type: ignore[method-assign]


GLOBAL: list[Any] = []
"""Hooks on the steps of all optimizers, to be taken away again."""
