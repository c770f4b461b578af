"""Which of two measured values is better: one rule for early stopping, for what hooks are told, and for best checkpoints."""

from __future__ import annotations

import math

MAX, MIN = "max", "min"
MODES = (MAX, MIN)
"""More is better (an accuracy), or less (a loss)."""


def counts(value: float) -> bool:
    """Return whether a value can be compared: what is infinite or no number is never the best."""
    return math.isfinite(value)


def is_better(value: float, best: float | None, mode: str, *, by: float = 0.0) -> bool:
    """Return whether a value is better by more than `by` than the best so far, if there is one; equal ones are not."""
    if not counts(value):
        return False
    return best is None or (value - best > by if mode == MAX else best - value > by)
