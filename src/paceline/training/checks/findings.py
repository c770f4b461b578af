"""What the checks of passes and of evaluations have in common."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paceline.compat.tensors import write_count


def writes_to(one: Tensor | None) -> int:
    """Return how often a tensor was written to, where that is counted."""
    return 0 if one is None or one.is_inference() else write_count(one)


def others_too(names: Sequence[str]) -> str:
    """Return the sentence that goes behind what is said of the first of some names."""
    return f" The same goes for {', '.join(names[1:4])}{' ...' * (len(names) > 4)}." if names[1:] else ""
