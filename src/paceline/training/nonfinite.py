"""Finds which shard and which samples made a loss NaN or infinite, and tells every worker."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from paceline.errors import NonFiniteLossError
from paceline.strategies.base import StepWork
from paceline.world import World, all_gather_object

_SHOWN = 8


def explain(
    error: NonFiniteLossError,
    work: StepWork,
    totals: Sequence[tuple[int, Tensor]],
    world: World,
    *,
    untouched: bool,
) -> NonFiniteLossError:
    """Give the same error with the place it came from; all workers get the same words."""
    found = [text for text in all_gather_object(world.comm, _mine(work, totals)) if text]
    words = [str(error), *found[:1]]
    if untouched:
        words.append("The weights are as they were before this step.")
    return NonFiniteLossError(" ".join(words))


def _mine(work: StepWork, totals: Sequence[tuple[int, Tensor]]) -> str:
    # The lowest, because threads report theirs in any order.
    bad = min((index for index, total in totals if not math.isfinite(float(total))), default=None)
    if bad is None:
        return ""
    samples = next(shard.samples for shard in work.shards if shard.index == bad).tolist()
    listed = ", ".join(map(str, samples[:_SHOWN])) + (
        f", ... ({len(samples)} in all)" if len(samples) > _SHOWN else ""
    )
    return f"It comes from shard {bad}, samples {listed}."
