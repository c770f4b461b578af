"""Where a module keeps its members and hooks, and classes of torch's layers that have no public name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter, methodcaller
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as _module
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd

MEMBERS = ("_parameters", "_buffers", "_modules")
"""The tables in which a module keeps what is registered on it."""
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""The tables in which a module keeps the hooks that were put on it."""
HOOK_TABLES = (
    *HOOKS,
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)
"""Those, and the tables that say how a hook among them is called."""

parameters_of: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter("_parameters")
"""Return the live table of a module's own parameters, names without one included."""
buffers_of: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_buffers")
"""Return the live table of a module's own buffers, names without one included."""
children_of: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")
"""Return the live table of a module's children; one that is there twice is in it twice."""
names_in = methodcaller("keys")
"""Return the names in one of these tables: those of a scripted module are no dicts, and are not iterated over."""
values_in = methodcaller("values")
"""Return the values of one."""
unsaved_buffers_of: Callable[[nn.Module], set[str]] = attrgetter("_non_persistent_buffers_set")
"""Return the names of a module's own buffers that `state_dict` leaves out."""

_GLOBAL_HOOKS = attrgetter(
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
)

plain_call: Callable[[nn.Module], Callable[..., Any]] = attrgetter("_call_impl")
"""Return what calls a module, hooks included, whatever a call of it was replaced by."""


def replace_call(module: nn.Module, call: Callable[..., Any]) -> None:
    """Have calls of a module go somewhere else, as `Module.compile` does it; copies and pickles of it go without."""
    module._compiled_call_impl = call


BatchNorm = _BatchNorm
"""The base of the layers that normalise by the statistics of a batch."""
NormWithStatistics = _NormBase
"""The base of the layers that keep running statistics."""
Dropout = _DropoutNd
"""The base of the dropout layers."""

trunc_normal_: Callable[..., Tensor] = nn.init._no_grad_trunc_normal_
"""What every way to a truncated normal ends in."""


@contextmanager
def replaced_trunc_normal(function: Callable[..., Tensor]) -> Iterator[None]:
    """Replace every truncated-normal initialization by `function` inside the context."""
    init: Any = nn.init
    init._no_grad_trunc_normal_ = function
    try:
        yield
    finally:
        init._no_grad_trunc_normal_ = trunc_normal_


def is_hooked(module: nn.Module) -> bool:
    """Return whether a hook was put on a module that runs around its forward pass or after its backward pass."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def hooked_everywhere() -> tuple[bool, ...]:
    """Return for each kind of hook whether one was put on all modules there are."""
    return tuple(map(bool, _GLOBAL_HOOKS(_module)))
