"""What an optimizer may be where its step is given less than all gradients: some parameters, or some rows of each.

A step that takes the norm of all gradients, and a hook on the step that does, would see this worker's part alone and go on
with it without a word. Nobody can tell from outside what a step looks at, so only torch's own steps are known to
pass; a class outside of torch says of itself `elementwise = True` or `per_parameter = True`, a hook `elementwise = True`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.compat.optim import step_hooks
from paceline.errors import InputError

_ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.Rprop,
    torch.optim.SparseAdam,
)
_OURS = ("torch.", "paceline.")
_ASIDE = frozenset(
    {"__init__", "__repr__", "__getstate__", "__setstate__", "state_dict", "load_state_dict"}
) | {"zero_grad", "add_param_group"}
"""What a subclass may write anew without its step becoming another one."""


class Scope(IntEnum):
    """How much of the model one call of an optimizer's step updates."""

    ROWS = 0
    """Some rows of each parameter."""
    PARAMETERS = 1
    """Some parameters, each of them whole."""
    ELSEWHERE = 2
    """All of it, but not on this worker or not on every one."""
    ALL = 3


class PartialUpdate:
    """Watches the optimizer of one worker: before the first step its class, before every update what was hung on it since."""

    def __init__(self, optimizer: Optimizer, scope: Scope, device: torch.device) -> None:
        """`device` is where the step computes; the parameters may lie elsewhere in between."""
        self._optimizer, self._scope, self._device = optimizer, scope, device
        self._patched = vars(optimizer).get("step")
        self._ours: list[tuple[str, Callable[..., Any]]] = []
        """The hooks on its step when all of them were torch's and paceline's: they stay so."""
        self.watches = scope < Scope.ALL
        """Whether there is anything to look at: an optimizer that updates everything here may look at everything."""
        if scope < Scope.ELSEWHERE:
            check_step(optimizer, scope, device)
        if self.watches:
            self._check_step_hooks()

    def check(self) -> None:
        """Raise for a hook or a step that was put on the optimizer since it was prepared; a microsecond."""
        patched = vars(self._optimizer).get("step")
        if self._scope < Scope.ELSEWHERE and patched is not self._patched:
            check_step(self._optimizer, self._scope, self._device)
            self._patched = patched
        if self.watches and step_hooks(self._optimizer) != self._ours:
            self._check_step_hooks()

    def _check_step_hooks(self) -> None:
        """Raise for a hook on the optimizer's step, or on all optimizers' steps, that neither torch nor paceline put there."""
        hooks = step_hooks(self._optimizer)
        others = [(how, hook) for how, hook in hooks if not _is_ours(hook)]
        self._ours = [] if others else hooks
        for how, hook in others:
            if not getattr(hook, "elementwise", False):
                raise InputError(
                    f"the optimizer has a hook of {how}, and here each worker's step sees some of the gradients only. "
                    "Use single, dp or ddp without --shard-optimizer, or leave the hook out (`max_grad_norm` takes the whole "
                    "norm); one that looks at no more than one number at a time says so: hook.elementwise = True."
                )


def keeps_no_gradient(optimizer: Optimizer) -> bool:
    """Return whether all that sees gradients in an optimizer's step is torch's own: that keeps copies, if anything."""
    kind = type(optimizer)
    own = [*vars(optimizer).values(), *vars(kind).values(), *(hook for _, hook in step_hooks(optimizer))]
    is_torchs = kind.__module__.startswith("torch.optim.") and _steps_as_torch(optimizer)
    return is_torchs and all(map(_is_ours, filter(callable, own)))


class PartialUpdates:
    """Watches the optimizers of one worker, where there are several."""

    def __init__(self, each: Sequence[PartialUpdate]) -> None:
        self._each = each
        self.watches = any(one.watches for one in each)

    def check(self) -> None:
        """Raise for a hook or a step that was put on one of them since it was prepared."""
        for one in self._each:
            one.check()


def watch_updates(
    optimizers: Sequence[Optimizer], scope: Scope, device: torch.device
) -> PartialUpdate | PartialUpdates:
    """Return what watches the optimizers of one worker."""
    each = [PartialUpdate(one, scope, device) for one in optimizers]
    return each[0] if len(each) == 1 else PartialUpdates(each)


def check_step(optimizer: Optimizer, scope: Scope, device: torch.device) -> None:
    """Raise for an optimizer whose update of what it is given may depend on what it is not given, or whose bits do."""
    name, kind = type(optimizer).__name__, type(optimizer)
    if scope is Scope.ROWS:
        _check_fused(optimizer, device)
    if getattr(optimizer, "elementwise", False):
        return
    if scope is Scope.PARAMETERS:
        if not _steps_as_torch(optimizer) and not getattr(optimizer, "per_parameter", False):
            raise InputError(
                f"each worker updates some of the parameters here, and {name} may look across parameters (a norm of all "
                "gradients). Use an optimizer of torch.optim, or single, dp or ddp without --shard-optimizer; if it does not, "
                "say so in its class: per_parameter = True."
            )
    elif not _steps_as_torch(optimizer) or not issubclass(kind, _ELEMENTWISE):
        raise InputError(
            f"each worker updates some rows of a parameter here, and {name} may look across rows. Use an optimizer of "
            f"torch.optim that does not (AdamW, SGD), or ddp; if {name} does not either, say so in its class: elementwise = True."
        )


def _is_ours(function: Callable[..., Any]) -> bool:
    """Return whether torch or paceline wrote this function; functools.wraps would lend it another's name, not its globals."""
    written = getattr(function, "__func__", function)
    return str(getattr(written, "__globals__", {}).get("__name__", "")).startswith(_OURS)


def _steps_as_torch(optimizer: Optimizer) -> bool:
    """Return whether the step in use is torch's own, in all its wrappers, and so is all that it calls of the optimizer."""
    layer: Any = optimizer.step
    while layer is not None:
        if not _is_ours(layer):
            return False
        layer = getattr(layer, "__wrapped__", None)
    torchs = next(one for one in type(optimizer).__mro__ if one.__module__.startswith(_OURS))
    return not any(
        callable(value) and name not in _ASIDE and hasattr(torchs, name) and name != "step"
        for one in type(optimizer).__mro__[: type(optimizer).__mro__.index(torchs)]
        for name, value in vars(one).items()
    )


def check_half(optimizer: Optimizer, device: torch.device) -> None:
    """Raise for weights of 16 bits whose rows are updated alone on a CPU: torch rounds the end of a tensor otherwise there."""
    held = (one for group in optimizer.param_groups for one in group["params"])
    if device.type == "cpu" and any(
        one.requires_grad and one.dtype in (torch.bfloat16, torch.float16) for one in held
    ):
        raise InputError(
            "the model trains weights of 16 bits, and on a CPU torch rounds an update of some rows differently than one of the "
            "whole tensor, so bits part. Keep the weights in 32 bits and compute in 16 (--precision bf16), or use ddp."
        )


def _check_fused(optimizer: Optimizer, device: torch.device) -> None:
    # On a CPU fused Adam has vector and scalar code that round apart (AdamW's weights part at step 41 in a model of few rows).
    apart = (torch.optim.SGD, torch.optim.Adam) if device.type == "cpu" else (torch.optim.SGD,)
    fused = optimizer.defaults.get("fused") or any(group.get("fused") for group in optimizer.param_groups)
    if isinstance(optimizer, apart) and fused:
        raise InputError(
            f"{type(optimizer).__name__}(fused=True) rounds a row differently alone than among others, so bits part. "
            "Leave fused out, or use ddp."
        )
