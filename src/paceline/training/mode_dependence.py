"""Finds what computes otherwise in training mode than in evaluation mode: dropout, normalisation, code that reads `training`."""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import Any

from torch import nn

from paceline.compat.code_names import names_of
from paceline.compat.modules import Dropout, NormWithStatistics

NORMALISING = (NormWithStatistics, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def depends_on_mode(module: nn.Module) -> bool:
    """Return whether a module, its children aside, computes something else when it trains."""
    if isinstance(module, Dropout):
        return module.p > 0
    if isinstance(module, (nn.MultiheadAttention, nn.RNNBase)) and module.dropout > 0:
        return True
    if isinstance(module, NormWithStatistics) and module.running_mean is not None:
        return True
    return isinstance(module, nn.RReLU) or _reads_mode(type(module))


def _reads_mode(kind: type[nn.Module]) -> bool:
    """Return whether `forward`, or a method or a function of its file that it calls, looks at `training`."""
    waiting: list[Any] = [kind.forward]
    seen: set[FunctionType] = set()
    while waiting:
        one = waiting.pop()
        if isinstance(one, (classmethod, staticmethod, property)):
            one = one.fget if isinstance(one, property) else one.__func__
        function = inspect.unwrap(one) if isinstance(one, FunctionType) else None
        if not isinstance(function, FunctionType):
            if one is kind.forward:
                return True  # what cannot be looked into may do so
            continue
        module = function.__module__ or ""
        if function in seen or module.startswith("torch.nn.modules."):
            continue  # torch's layers are known by their kinds
        seen.add(function)
        names = names_of(function.__code__)
        if "training" in names.attributes:
            return True
        for name in names.attributes:
            written = [vars(of)[name] for of in kind.__mro__ if name in vars(of)]
            waiting += written if "super" in names.globals else written[:1]
        called = (function.__globals__.get(name) for name in names.globals)
        waiting += [one for one in called if isinstance(one, FunctionType) and one.__module__ == module]
    return False
