"""Every optimizer of torch, and schedules."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim import lr_scheduler as schedules
from torch.optim.lr_scheduler import LRScheduler

import paceline
from tests.zoo.exhibits import BY_ROWS, exhibit
from tests.zoo.tasks.base import Small


def _optimized(
    name: str,
    optimizer: str,
    refused_by: dict[str, str] | None = None,
    *,
    plain: bool = True,
    **options: Any,
) -> None:
    """Put a task with an optimizer of torch's into the zoo, where this torch has it."""
    made = getattr(torch.optim, optimizer, None)
    if made is None:
        return

    class Optimized(Small):
        def optimizer(self, model: nn.Module) -> Optimizer:
            kept = [one for one in model.parameters() if optimizer != "Muon" or one.ndim == 2]
            return made(kept, **options)

    Optimized.__name__ = Optimized.__qualname__ = name.title().replace("-", "")
    globals()[Optimized.__name__] = exhibit(name, f"`torch.optim.{optimizer}`", refused_by, plain=plain)(
        Optimized
    )


_optimized("momentum", "SGD", lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)
_optimized("adam", "Adam", lr=0.01, amsgrad=True, weight_decay=0.01)
_optimized("adagrad", "Adagrad", lr=0.05)
_optimized("adadelta", "Adadelta", lr=0.5)
_optimized("adamax", "Adamax", lr=0.01)
_optimized("asgd", "ASGD", lr=0.05, t0=2)
_optimized("nadam", "NAdam", lr=0.01)
_optimized("radam", "RAdam", lr=0.01)
_optimized("rmsprop", "RMSprop", lr=0.005, centered=True, momentum=0.5)
_optimized("rprop", "Rprop", lr=0.01)
_optimized("adafactor", "Adafactor", BY_ROWS, lr=0.01)
_optimized("muon", "Muon", BY_ROWS, lr=0.01)
_optimized(
    "lbfgs",
    "LBFGS",
    dict.fromkeys(("zero", "fsdp", "pp", "tp", "ps", "local-sgd"), "computes the loss several times"),
    plain=False,  # the textbook's loop gives no closure
    lr=0.1,
    max_iter=3,
)


class _Scheduled(Small):
    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@exhibit("one-cycle", "`OneCycleLR`, which moves the momentum too", meshes=True)
class OneCycle(_Scheduled):
    """A schedule that needs the number of steps."""

    def scheduler(self, optimizer: Optimizer, total_steps: int | None) -> LRScheduler:
        return schedules.OneCycleLR(optimizer, max_lr=0.2, total_steps=total_steps)


@exhibit("warm-restarts", "`CosineAnnealingWarmRestarts` after a linear warm-up (`SequentialLR`)")
class WarmRestarts(_Scheduled):
    """Two schedules, one after the other."""

    def scheduler(self, optimizer: Optimizer, total_steps: int | None) -> LRScheduler:
        warm = schedules.LinearLR(optimizer, start_factor=0.1, total_iters=2)
        waves = schedules.CosineAnnealingWarmRestarts(optimizer, T_0=2, T_mult=2)
        return schedules.SequentialLR(optimizer, [warm, waves], milestones=[2])


@exhibit("plateau", "`ReduceLROnPlateau`", {"*": "ReduceLROnPlateau"})
class Plateau(_Scheduled):
    """A schedule that wants to be told a number."""

    def scheduler(self, optimizer: Optimizer, total_steps: int | None) -> LRScheduler:
        return schedules.ReduceLROnPlateau(optimizer, patience=1)


@exhibit("plateau-on-metric", "`ReduceLROnPlateau` by a metric (`paceline.OnMetric`)", plain=False)
class PlateauOnMetric(_Scheduled):
    """A schedule that is told a number at the end of each epoch."""

    def scheduler(self, optimizer: Optimizer, total_steps: int | None) -> Any:
        return paceline.OnMetric(
            schedules.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=1.0), "loss"
        )


class _Slowing(Optimizer):
    """Smaller steps as time goes by; the time is kept under a name, as schedule-free optimizers do."""

    per_parameter = True

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        own = self.state["global"]
        own["steps"] = own.get("steps", 0) + 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"] / own["steps"])


@exhibit(
    "own-state",
    'an optimizer that keeps state under a name (`self.state["global"]`)',
    {
        **dict.fromkeys(("zero", "pp", "ps", "local-sgd"), "belongs to no parameter"),
        **BY_ROWS,
    },
)
class OwnState(Small):
    """It is saved and resumed."""

    def optimizer(self, model: nn.Module) -> Optimizer:
        return _Slowing(model.parameters(), lr=0.3)


class _GlobalNorm(torch.optim.SGD):
    """Torch's update after a look at all gradients, as LAMB and many clipping optimizers take one."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        _max_grad_norm(self)
        super().step()


@exhibit(
    "own-step",
    "an optimizer with a step of its own that takes the norm of all gradients",
    {**BY_ROWS, **dict.fromkeys(("zero", "pp", "ps"), "may look across parameters")},
    plain=False,
)
class OwnStep(Small):
    """Clips in its step."""

    def optimizer(self, model: nn.Module) -> Optimizer:
        return _GlobalNorm(model.parameters(), lr=0.1, momentum=0.9)


def _max_grad_norm(optimizer: Optimizer, *_: Any) -> None:
    held = [one for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
    nn.utils.clip_grad_norm_(held, 0.2)


@exhibit(
    "step-hook",
    "`optimizer.register_step_pre_hook` that looks across parameters",
    dict.fromkeys(("zero", "fsdp", "pp", "tp", "ps"), "has a hook of register_step_pre_hook"),
    plain=False,
)
class StepHook(Small):
    """Clips in the hook."""

    def optimizer(self, model: nn.Module) -> Optimizer:
        made = super().optimizer(model)
        made.register_step_pre_hook(_max_grad_norm)
        return made
