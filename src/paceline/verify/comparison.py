"""Finds the first place where a run parts from the reference, in the order of cause: data, loss, gradient, weight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from paceline.verify.record import Record, StepRecord


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first thing that is not to the bit what the reference had."""

    step: int
    kind: str
    """samples, data, starting weight, loss of a shard, loss, gradient, learning rate, weight, optimizer state or buffer."""
    name: str
    """Which tensor, or which shard."""
    rank: int
    others: int = 0
    """How many more of the same kind differ in the same step."""

    def __str__(self) -> str:
        more = f" (and {self.others} more)" if self.others else ""
        return f"step {self.step}, rank {self.rank}: {self.kind} {self.name}{more}"


def first_difference(reference: Record, ranks: Sequence[Record]) -> Difference | None:
    """Compare every worker's record with the reference's; None where all are the same bits."""
    place = _places(reference)
    for rank in ranks:
        found = _named("starting weight", 0, rank.rank, reference.start, rank.start, place)
        if found:
            return found
    for number, step in enumerate(reference.steps):
        there = [(rank.rank, rank.steps[number]) for rank in ranks if number < len(rank.steps)]
        if len(there) < len(ranks):
            missing = next(rank.rank for rank in ranks if number >= len(rank.steps))
            return Difference(step=number, kind="samples", name="(the run ended before)", rank=missing)
        found = next(_of_step(step, there, place), None)
        if found:
            return found
    longer = next((rank for rank in ranks if len(rank.steps) > len(reference.steps)), None)
    if longer is not None:
        return Difference(
            step=len(reference.steps), kind="samples", name="(the run goes on)", rank=longer.rank
        )
    return None


def _of_step(
    step: StepRecord, there: Sequence[tuple[int, StepRecord]], place: Mapping[str, int]
) -> Iterator[Difference]:
    number = step.number
    for kind, attribute in (("samples", "samples"), ("data", "data"), ("loss of a shard", "shard_losses")):
        for rank, other in there:
            mine, theirs = getattr(step, attribute), getattr(other, attribute)
            wrong = [shard for shard in theirs if theirs[shard] != mine.get(shard)]
            if wrong:
                yield Difference(
                    step=number, kind=kind, name=f"of shard {wrong[0]}", rank=rank, others=len(wrong) - 1
                )
        served = {shard for _, other in there for shard in getattr(other, attribute)}
        lost = [shard for shard in getattr(step, attribute) if shard not in served]
        if lost:
            yield Difference(step=number, kind=kind, name=f"of shard {lost[0]} (missing)", rank=there[0][0])
    for rank, other in there:
        found = _named("gradient", number, rank, step.gradients, other.gradients, place)
        if found:
            yield found
    for rank, other in there:
        # The mean loss comes behind the gradients: it is combined with them, and says less about where.
        if other.loss.hex() != step.loss.hex():
            yield Difference(step=number, kind="loss", name="of the global batch", rank=rank)
        if other.rates != step.rates:
            yield Difference(
                step=number, kind="learning rate", name=f"{other.rates[0]:g} not {step.rates[0]:g}", rank=rank
            )
    for kind, attribute in (("weight", "weights"), ("optimizer state", "optimizer"), ("buffer", "buffers")):
        for rank, other in there:
            found = _named(kind, number, rank, getattr(step, attribute), getattr(other, attribute), place)
            if found:
                yield found


def _named(
    kind: str,
    step: int,
    rank: int,
    mine: Mapping[str, str],
    theirs: Mapping[str, str],
    place: Mapping[str, int],
) -> Difference | None:
    names = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
    if not names:
        return None
    first = min(names, key=lambda name: place.get(name.partition(":")[0], len(place)))
    return Difference(step=step, kind=kind, name=first, rank=rank, others=len(names) - 1)


def _places(reference: Record) -> dict[str, int]:
    """Give each tensor its place in the order in which the forward pass came to its module."""
    order = {module: number for number, module in enumerate(reference.modules)}
    names = sorted(reference.start, key=lambda name: order.get(name.rpartition(".")[0], len(order)))
    return {name: number for number, name in enumerate(names)}


def count_samples(reference: Record, ranks: Sequence[Record]) -> tuple[int, int]:
    """Give how many samples were lost, and how many were served more often than the reference served them."""
    wanted, served = _served([reference]), _served(ranks)
    return (wanted - served).total(), (served - wanted).total()


def _served(ranks: Sequence[Record]) -> Counter[tuple[int, int]]:
    return Counter(
        (step.epoch, sample)
        for rank in ranks
        for step in rank.steps
        for shard in step.samples.values()
        for sample in shard
    )
