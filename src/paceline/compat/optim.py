"""What optimizers and gradient scalers keep under private names."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

step_pre_hooks: Callable[[Optimizer], dict[int, Any]] = attrgetter("_optimizer_step_pre_hooks")
"""Return the hooks of `register_step_pre_hook`, in the order in which they run."""


def step_hooks(optimizer: Optimizer) -> list[tuple[str, Callable[..., Any]]]:
    """Return each hook on an optimizer's step, or on the steps of all, with the name of the function that put it there."""
    tables = (
        ("register_step_pre_hook", optimizer._optimizer_step_pre_hooks),
        ("register_step_post_hook", optimizer._optimizer_step_post_hooks),
        ("register_optimizer_step_pre_hook", torch_optimizer._global_optimizer_pre_hooks),
        ("register_optimizer_step_post_hook", torch_optimizer._global_optimizer_post_hooks),
    )
    return [(how, hook) for how, hooks in tables for hook in hooks.values()]


def ensure_hooks(optimizer: Optimizer) -> None:
    """Make an optimizer run its step hooks, even one (a wrapper) that never called torch's constructor."""
    optimizer._patch_step_function()


def step_without_hooks(optimizer: Optimizer) -> None:
    """Take a step of one of torch's own optimizers past the hooks on it."""
    type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]


def has_own_step(optimizer: Optimizer) -> bool:
    """Return whether somebody has put another step on an optimizer than its class's, which a schedule may have wrapped."""
    step = vars(optimizer).get("step")
    wrapped = getattr(step, "__wrapped__", None) if hasattr(step, "_wrapped_by_lr_sched") else None
    return step is not None and wrapped is not type(optimizer).step


def mark_stepped(optimizer: Optimizer) -> None:
    """Mark the optimizer as stepped, so that a scheduler does not warn of stepping before it."""
    vars(optimizer)["_opt_called"] = True


def overflows(scaler: GradScaler, optimizer: Optimizer) -> list[Tensor]:
    """Return the live flags of `unscale_`, one per device: not 0 where a gradient was not finite."""
    return [*scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()]
