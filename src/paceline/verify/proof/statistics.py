"""What a statistical promise is held to: the loss curve, against a band that one-process runs with other seeds span.

"The same in expectation" says nothing about weights, so what is compared is the mean loss over the second half of the
steps. Other seeds give other weights to start from, another order and other dropout: a run that is the same in
expectation is as far from the reference as those runs are from each other. The band is from the lowest to the highest
of four such runs (the reference and three more seeds), widened on each side by

- its own width, since four runs span only a part of what seeds can do, and
- a tenth of what the reference has learned by then (the fall of its loss from the first step): workers that meet
  only now and then, compressed gradients and stale weights are slower in their first steps.

A curve may not have seen the last average yet, so the weights are held to something too: they may have moved at most
three times as far from the start as the reference's did. Fewer than eight steps make no curve. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

SEEDS = 3
FEWEST_STEPS = 8
FARTHEST = 3.0
_LEARNED = 0.1


@dataclass(frozen=True, kw_only=True)
class Band:
    """From where to where the mean loss of the second half may be."""

    low: float
    high: float

    def holds(self, loss: float) -> bool:
        """Return whether a mean loss is in it; one that is no number is not."""
        return self.low <= loss <= self.high

    def __str__(self) -> str:
        return f"{self.low:.4g} to {self.high:.4g}"


def second_half(losses: Sequence[float]) -> float:
    """Return the mean over the second half of a loss curve."""
    return fmean(losses[len(losses) // 2 :])


def band(reference: Sequence[float], others: Sequence[Sequence[float]]) -> Band:
    """Return the band around the reference, from its own curve and those of other seeds."""
    ends = [second_half(losses) for losses in (reference, *others)]
    ends = [end for end in ends if math.isfinite(end)] or [math.nan]
    learned = max(0.0, reference[0] - second_half(reference))
    width = (max(ends) - min(ends)) + _LEARNED * learned
    return Band(low=min(ends) - width, high=max(ends) + width)
