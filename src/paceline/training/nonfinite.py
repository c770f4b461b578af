"""Finds which shard and which samples made a loss NaN or infinite, and tells every worker."""

from __future__ import annotations

import math

from paceline.errors import NonFiniteLossError
from paceline.strategies.base import OpenReplica, StepWork
from paceline.world import World, all_gather_object

_SHOWN = 8


def explain(
    error: NonFiniteLossError, work: StepWork, replica: OpenReplica, world: World
) -> NonFiniteLossError:
    """Give the same error with the place it came from; all workers get the same words."""
    found = [text for text in all_gather_object(world.comm, _mine(work, replica)) if text]
    where = found[0] if found else "Each shard's own loss is finite: their sum overflows."
    return NonFiniteLossError(f"{error} {where} The weights are as they were before this step.")


def _mine(work: StepWork, replica: OpenReplica) -> str:
    # The lowest, because threads report theirs in any order.
    bad = min((index for index, total in replica.totals if not math.isfinite(float(total))), default=None)
    if bad is None:
        return ""
    samples = next(shard.samples for shard in work.shards if shard.index == bad).tolist()
    listed = ", ".join(map(str, samples[:_SHOWN])) + (
        f", ... ({len(samples)} in all)" if len(samples) > _SHOWN else ""
    )
    return f"It comes from shard {bad}, samples {listed}."
