"""Finds the first place where a run differs from the reference, in the order of cause: data, loss, gradient, weight."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.verify.proof.record import Record, StepRecord


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first thing that is not to the bit what the reference had."""

    step: int
    kind: str
    """samples, data, starting weight, loss, gradient, learning rate, weight, optimizer state, buffer or metric."""
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
    return _metric(reference, ranks)


def _metric(reference: Record, ranks: Sequence[Record]) -> Difference | None:
    """Compare what an evaluation after the last step came to."""
    for rank in ranks:
        for name in sorted(reference.metrics.keys() | rank.metrics.keys()):
            mine, theirs = (one.metrics.get(name, math.nan) for one in (reference, rank))
            if mine.hex() != theirs.hex():
                told = f"{name} ({theirs:.8g} not {mine:.8g})"
                return Difference(step=len(reference.steps) - 1, kind="metric", name=told, rank=rank.rank)
    return None


def resumed(reference: Record, at: int) -> Record:
    """Return the reference as a run that was resumed after `at` steps would have it."""
    before = reference.steps[at - 1]
    return replace(reference, start={**before.weights, **before.buffers}, steps=reference.steps[at:])


def _of_step(
    step: StepRecord, there: Sequence[tuple[int, StepRecord]], place: Mapping[str, int]
) -> Iterator[Difference]:
    """Return the differences of one step, causes before effects."""
    for kind, attribute in (("samples", "samples"), ("data", "data"), ("loss", "shard_losses")):
        yield from _by_shard(kind, attribute, step, there)
    yield from _by_name("gradient", "gradients", step, there, place)
    for rank, other in there:
        # The mean loss comes after the gradients: it is combined with them, and says less about where.
        if other.loss.hex() != step.loss.hex():
            losses = f"of the global batch ({other.loss:.8g} not {step.loss:.8g})"
            yield Difference(step=step.number, kind="loss", name=losses, rank=rank)
        if other.rates != step.rates:
            rates = f"{_shown(other.rates)} not {_shown(step.rates)}"
            yield Difference(step=step.number, kind="learning rate", name=rates, rank=rank)
    for kind, attribute in (("weight", "weights"), ("optimizer state", "optimizer"), ("buffer", "buffers")):
        yield from _by_name(kind, attribute, step, there, place)


def _by_shard(
    kind: str, attribute: str, step: StepRecord, there: Sequence[tuple[int, StepRecord]]
) -> Iterator[Difference]:
    mine = getattr(step, attribute)
    served = set()
    for rank, other in there:
        theirs = getattr(other, attribute)
        served |= theirs.keys()
        wrong = [shard for shard in theirs if theirs[shard] != mine.get(shard)]
        if wrong:
            shard, more = wrong[0], len(wrong) - 1
            name = f"of shard {shard}"
            if kind == "loss":
                name += f" ({_total(theirs[shard])} not {_total(mine.get(shard, ()))})"
            yield Difference(step=step.number, kind=kind, name=name, rank=rank, others=more)
    lost = [shard for shard in mine if shard not in served]
    if lost:
        yield Difference(step=step.number, kind=kind, name=f"of shard {lost[0]} (missing)", rank=there[0][0])


def _shown(rates: Sequence[float]) -> str:
    return ", ".join(f"{rate:g}" for rate in rates) or "(no update)"


def _total(losses: Sequence[str]) -> str:
    return f"{sum(float.fromhex(loss) for loss in losses):.8g}"


def _by_name(
    kind: str,
    attribute: str,
    step: StepRecord,
    there: Sequence[tuple[int, StepRecord]],
    place: Mapping[str, int],
) -> Iterator[Difference]:
    for rank, other in there:
        found = _named(kind, step.number, rank, getattr(step, attribute), getattr(other, attribute), place)
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
    """Return the place of each tensor in the order in which the forward pass came to its module."""
    order = {module: number for number, module in enumerate(reference.modules)}
    names = sorted(reference.start, key=lambda name: order.get(name.rpartition(".")[0], len(order)))
    return {name: number for number, name in enumerate(names)}


def count_samples(reference: Record, ranks: Sequence[Record]) -> tuple[int, int]:
    """Return how many samples were lost, and how many were served more often than the reference served them."""
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
