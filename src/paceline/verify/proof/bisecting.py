"""Finds the first operation of a step that differs between two runs whose calls were written down. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher

from paceline.verify.proof.differences import Difference
from paceline.verify.proof.record import TorchCall

_AFTER = {
    "gradient": "where the gradients of the shards are combined, clipped and handed to the optimizer",
    "loss": "where the losses of the shards are combined",
    "weight": "in the optimizer's update",
    "optimizer state": "in the optimizer's update",
    "buffer": "where the buffers of the shards are combined",
}
"""What comes after the forward and backward passes of a step, by what differs there."""


def first_operation(
    reference: Sequence[TorchCall], ranks: Iterable[Sequence[TorchCall]], difference: Difference
) -> str:
    """Return which operation is the first that differs: forwards through every batch, then backwards; or that none is."""
    theirs = [call for rank in ranks for call in rank]
    batches = sorted({(call.shard, call.batch) for call in reference})
    pairs = {one: _pairs(_of(reference, one), _of(theirs, one)) for one in batches}
    for one in batches:
        for mine, other in pairs[one]:
            found = _forward(mine, other)
            if found:
                return found
    for one in batches:
        for mine, other in reversed(pairs[one]):
            if mine.gradient != other.gradient and mine.gradient and other.gradient:
                return (
                    f"the backward pass of shard {one[0]}: the gradient that arrives at the output of {_named(mine)} "
                    "differs; all that comes after it, and the whole forward pass, is the same"
                )
    compared = sum(len(found) for found in pairs.values())
    place = _AFTER.get(difference.kind)
    if not compared or place is None:
        return ""
    return (
        f"none of the {compared} operations of the forward and backward passes: each shard's are the same; "
        f"it differs {place}"
    )


def _of(calls: Iterable[TorchCall], batch: tuple[int, int]) -> list[TorchCall]:
    return [call for call in calls if (call.shard, call.batch) == batch]


def _pairs(mine: Sequence[TorchCall], theirs: Sequence[TorchCall]) -> list[tuple[TorchCall, TorchCall]]:
    """Match the calls of two runs by name and order: a strategy may make some of its own in between."""
    matcher = SequenceMatcher(
        None, [call.function for call in mine], [call.function for call in theirs], autojunk=False
    )
    return [
        (mine[block.a + place], theirs[block.b + place])
        for block in matcher.get_matching_blocks()
        for place in range(block.size)
    ]


def _forward(mine: TorchCall, other: TorchCall) -> str:
    if mine.output == other.output and mine.inputs == other.inputs:
        return ""
    where = f"shard {mine.shard}: {_named(mine)}"
    if mine.inputs == other.inputs:
        return f"{where}: the same inputs, another output"
    for number, (left, right) in enumerate(zip(mine.inputs, other.inputs, strict=False)):
        if left != right:
            # Everything computed before is the same, so this came from elsewhere.
            shown = f" ({right} not {left})" if len(left) < 24 and len(right) < 24 else ""
            return f"{where}: its argument {number} is another{shown}, and no operation before it differs"
    return f"{where}: it is given other arguments"


def _named(call: TorchCall) -> str:
    return (
        f"{call.function} in module {call.module}" if call.module else f"{call.function} in the loss function"
    )
