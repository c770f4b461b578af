"""torch's compiler has its own switch for deterministic kernels, which `torch.use_deterministic_algorithms` sets with its own."""

from __future__ import annotations

import sys

_CONFIG = "torch._inductor.config"


def deterministic() -> bool:
    """Return the switch, without loading the compiler for it: until then it is off."""
    return bool(getattr(sys.modules.get(_CONFIG), "deterministic", False))


def set_deterministic(value: bool) -> None:
    """Set it, where the compiler is loaded and has it."""
    config = sys.modules.get(_CONFIG)
    if hasattr(config, "deterministic") and config.deterministic != value:  # type: ignore[union-attr]
        config.deterministic = value  # type: ignore[union-attr]
