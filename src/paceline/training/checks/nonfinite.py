"""Finds what made a loss or a weight NaN or infinite, and tells every worker."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.errors import NonFiniteLossError
from paceline.state.chunks import MODEL
from paceline.strategies.base import StepWork
from paceline.strategies.replica import Replica
from paceline.world import World, all_gather_object

_SHOWN = 8


def explain(
    error: NonFiniteLossError,
    work: StepWork,
    totals: Sequence[tuple[int, Tensor]],
    world: World,
    replica: Replica,
    *,
    untouched: bool,
) -> NonFiniteLossError:
    """Return the same error with the place it came from; all workers get the same words."""
    sound = any(math.isfinite(float(total)) for _, total in totals)
    mine = (_mine(work, totals), _spoiled(replica) if untouched else "", sound or not totals)
    seen = all_gather_object(world.comm, mine)
    spoiled = next((name for _, name, _ in seen if name), "")
    if spoiled:
        # Every sample makes a loss of nothing then: none of them is to blame.
        return NonFiniteLossError(
            f"{error} {spoiled} was no number before this step began: an earlier update made it so, {_cause(replica)}"
        )
    words = [str(error), *[text for text, _, _ in seen if text][:1]]
    if untouched:
        words.append("The weights are as they were before this step.")
    else:
        if not any(found for _, _, found in seen):
            words.append("Every batch of this step is so: the update before may have spoiled the weights.")
        words.append(
            "Its own update was made before these numbers came from the GPU: resume from a checkpoint."
        )
    return NonFiniteLossError(" ".join(words))


def check_weights(replica: Replica, world: World, number: int) -> None:
    """Raise on all workers where a weight of any of them is no finite number: nothing is saved or reported as trained."""
    spoiled = next((name for name in all_gather_object(world.comm, _spoiled(replica)) if name), "")
    if spoiled:
        raise NonFiniteLossError(
            f"after {number} steps {spoiled} holds nan or infinity, though every loss was finite, so this state is not saved: "
            f"an update made it so, {_cause(replica)}"
        )


def note_options(replica: Replica, number: int) -> None:
    """Note with which option a step is taken that is no finite number: a schedule may have moved on when weights show it."""
    if not replica.unsound_option and (found := unsound_option(replica.optimizer, waits=False)):
        replica.unsound_option = "{} was {} in step {}".format(*found, number)


def unsound_option(optimizer: Optimizer, *, waits: bool = True) -> tuple[str, float] | None:
    """Return an option of an optimizer's that is no finite number, if any; those on a device are asked only if this `waits`."""
    for group in optimizer.param_groups:
        for name, value in group.items():
            number = value
            if isinstance(value, Tensor) and value.numel() == 1 and (waits or value.device.type == "cpu"):
                number = value.item()
            if isinstance(number, float) and not math.isfinite(number):
                return name, number
    return None


def _cause(replica: Replica) -> str:
    """Return what can have spoiled the weights, and what to do about it."""
    now = unsound_option(replica.optimizer)
    if said := replica.unsound_option if now is None else "{} is {}".format(*now):
        return f"for the optimizer's {said}. Mend what sets it, the schedule say, and begin anew."
    return (
        "from an infinite gradient beside a finite loss. Resume from a checkpoint before that with a smaller learning rate, or "
        "with --max-grad-norm: the norm of each step's gradient is then checked before its update."
    )


def _spoiled(replica: Replica) -> str:
    """Return the name of the first trained parameter here that is no number, if any."""
    trained = {name for name, parameter in replica.model.named_parameters() if parameter.requires_grad}
    for key, chunk in replica.local_state().chunks.items():
        section, _, name = key.partition("/")
        if section == MODEL and name in trained and not _finite(chunk.values):
            return name
    return ""


def _finite(values: Tensor) -> bool:
    if not values.numel() or not (values.is_floating_point() or values.is_complex()):
        return True
    # The smallest and the largest: one pass that keeps nothing, and either is nan where anything is.
    low, high = torch.aminmax(torch.view_as_real(values) if values.is_complex() else values.detach())
    return math.isfinite(low) and math.isfinite(high)


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
