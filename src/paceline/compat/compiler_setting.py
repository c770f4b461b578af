"""Switches of torch's compiler that paceline changes, without loading the compiler to know them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_SWITCHES = {
    # `torch.use_deterministic_algorithms` sets it with its own.
    "torch._inductor.config": ("deterministic",),
    "torch._dynamo.config": (
        "recompile_limit",
        "accumulated_recompile_limit",
        "skip_nnmodule_hook_guards",
    ),
}


@contextmanager
def preserved() -> Iterator[None]:
    """Put the switches back afterwards: to what they were, or, where the compiler was not loaded, to what it begins with."""
    before = {module: _values(module, names) for module, names in _SWITCHES.items()}
    try:
        yield
    finally:
        for module, names in _SWITCHES.items():
            for name, now in (_values(module, names) or {}).items():
                then = before[module]
                value = _default(module, name) if then is None else then[name]
                if now != value:
                    setattr(sys.modules[module], name, value)


def _values(module: str, names: tuple[str, ...]) -> dict[str, Any] | None:
    """Return those that this torch has; None while the compiler is not loaded."""
    config = sys.modules.get(module)
    return (
        None if config is None else {name: getattr(config, name) for name in names if hasattr(config, name)}
    )


def _default(module: str, name: str) -> Any:
    """Return what a switch is when its module is loaded, which may have read it from the environment."""
    return sys.modules[module]._config[name].default
