"""torchmetrics, where it is installed: which states it can merge without a weight, and its own exchange between workers."""

from __future__ import annotations

from typing import Any


def unmergeable(metric: Any) -> str | None:
    """Return why merging two of this metric would not give the metric of both; None where it does, or is none of theirs."""
    reductions = getattr(metric, "_reductions", None)
    if not isinstance(reductions, dict):
        return None
    if metric.full_state_update is not False:
        return "it needs all values at once (full_state_update)"
    for name, reduction in reductions.items():
        if getattr(reduction, "__name__", "") == "dim_zero_mean":
            return f"its state {name!r} is a mean without a weight"
        if reduction is None and not isinstance(getattr(metric, name), list):
            return f"its state {name!r} has no rule by which two are merged"
    return None


def keep_alone(metric: Any) -> None:
    """Have a metric compute what it holds, without an exchange of its own: it holds what all workers have measured."""
    modules = getattr(metric, "modules", None)
    for one in modules() if callable(modules) else ():
        if hasattr(one, "distributed_available_fn"):
            one.distributed_available_fn = _never


def _never() -> bool:
    return False
