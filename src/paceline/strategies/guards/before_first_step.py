"""What every strategy refuses before the first step: code that would train something else than one process does.

All of it is looked up on objects that the user made, so that no strategy has to know the optimizers and schedules of
other packages by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable

from torch import nn
from torch.optim import Optimizer

from paceline.compat.tensors import hooks_of, post_accumulate_hooks_of
from paceline.errors import InputError
from paceline.strategies.guards.schedules import check_parts


def check_optimizer(optimizer: object) -> None:
    """Raise for what is no optimizer, or for one whose step needs more than gradients."""
    if not isinstance(optimizer, Optimizer):
        raise InputError(
            f"the optimizer is a {type(optimizer).__name__}, not a torch.optim.Optimizer. Return one."
        )
    needed = _needed(optimizer)
    if needed and not needs_closure(optimizer):
        raise InputError(
            f"{type(optimizer).__name__}.step needs {needed[0]!r}, and paceline gives it gradients, or a closure that computes "
            "the loss. Use an optimizer that works from those (AdamW, SGD, LBFGS)."
        )


def needs_closure(optimizer: object) -> bool:
    """Return whether an optimizer computes loss and gradient itself, as often as it likes."""
    return _needed(optimizer) == ["closure"]


def check_scheduler(scheduler: object, optimizer: Optimizer) -> None:
    """Raise for a schedule that `scheduler.step()` after each optimizer step does not move, or that moves another optimizer."""
    if scheduler is None:
        return
    name = type(scheduler).__name__
    step = getattr(scheduler, "step", None)
    if not callable(step):
        raise InputError(
            f"the scheduler is a {name}, which has no step(). Return a schedule of torch.optim.lr_scheduler, or None."
        )
    needed = _needed(scheduler)
    if needed:
        raise InputError(
            f"{name}.step needs {needed[0]!r}, but a schedule here is stepped without arguments, once after every optimizer "
            f'step. Wrap it, and it is given a metric at the end of each epoch: paceline.OnMetric(scheduler, "loss"); or use one '
            "that counts steps (LambdaLR, OneCycleLR, CosineAnnealingLR)."
        )
    moved = getattr(scheduler, "optimizer", optimizer)
    if moved is not optimizer:
        raise InputError(
            f"the {name} belongs to another optimizer than the one that trains, so it would change nothing. Make it with the "
            "optimizer that scheduler() is given."
        )
    check_parts(scheduler)


def check_hooks(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Raise for hooks that see a gradient before it is whole: after a backward pass there are parts of it on every shard."""
    for name, parameter in named:
        if post_accumulate_hooks_of(parameter):
            raise InputError(_PARTIAL.format(name=name))


def has_hooks(parameter: nn.Parameter) -> bool:
    """Return whether `register_hook` was called on this parameter: the hook runs on each backward pass's gradient."""
    return bool(hooks_of(parameter))


_PARTIAL = (
    "{name} has a hook of register_post_accumulate_grad_hook: it runs after every backward pass, when the gradient is neither "
    "summed over the shards and workers nor divided by its weight. Leave it out: work on gradients or weights after "
    "step.apply(), or in the optimizer (optimizer.register_step_pre_hook)."
)


def _needed(owner: object) -> list[str]:
    """Return the arguments that `owner.step()` lacks; of its class, because a schedule wraps the step of its optimizer."""
    try:
        _, *parameters = inspect.signature(type(owner).step).parameters.values()  # type: ignore[attr-defined]
    except (AttributeError, TypeError, ValueError):  # a function of C tells nothing; its call will
        return []
    return [
        one.name
        for one in parameters
        if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
