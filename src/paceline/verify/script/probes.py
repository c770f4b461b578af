"""Probes of a script's data and model: who read what, in which order, and from which weights it started."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline.verify.proof.record import first_other
from paceline.verify.report import Finding
from paceline.verify.script.script_trace import Pass, ScriptTrace, StepTrace


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The one-process run and every rank of the other."""

    one: ScriptTrace
    many: Sequence[ScriptTrace]
    scale: int = 1
    """By how much the one process's batches were enlarged to make up the same global batch."""
    multiple: float | None = None
    """By which factor the first gradient of several workers is one process's, every tensor of it alike."""

    def steps_beside_first(self) -> Iterator[tuple[int, int, StepTrace, StepTrace]]:
        """Yield every step of every other rank: the rank, the step's number, the step on rank 0, and on that rank."""
        for trace in self.many[1:]:
            for number, (mine, theirs) in enumerate(zip(self.many[0].steps, trace.steps, strict=False)):
                yield trace.rank, number, mine, theirs

    @property
    def first_pass(self) -> list[list[list[int]]]:
        """The batches of each rank in its first training pass."""
        return [trace.training[0].batches for trace in self.many if trace.training]

    @property
    def shared(self) -> list[Pass]:
        """The first training pass of each rank, where their ids mean the same samples; else nothing."""
        passes = [trace.training[0] for trace in self.many if trace.training]
        alike = {(one.samples, one.data) for one in passes}
        return passes if len(passes) > 1 and len(alike) == 1 and passes[0].data else []


def batch_of_world(seen: Seen) -> Finding | None:
    """Check whether the script's batches had to be enlarged for one process."""
    if seen.scale == 1:
        return None
    local = len(seen.first_pass[0][0])
    return Finding(
        probe="batch_of_world",
        cause=f"the global batch grows with the number of workers: {len(seen.many)} x {local} samples.",
        evidence=f"each rank reads batches of {local}, and so does one process; for this comparison it was given "
        f"{seen.scale * local}.",
        remedy="if the answer is to be the same on any number of workers, divide the batch size by WORLD_SIZE.",
        harmless=True,
    )


def every_rank_all_data(seen: Seen) -> Finding | None:
    """Compare the samples of two ranks in the first epoch."""
    passes = seen.shared
    if not passes:
        return None
    sets = [set(one.indices) for one in passes]
    shared = set.intersection(*sets)
    if any(len(one) != passes[0].samples for one in sets) or len(shared) != passes[0].samples:
        return None
    return Finding(
        probe="no_distributed_sampler",
        cause="every rank goes through all the data: no sampler shares it out.",
        evidence=f"in the first epoch each of {len(passes)} ranks read all {passes[0].samples} samples, through a "
        f"{passes[0].sampler}.",
        remedy="give the DataLoader sampler=DistributedSampler(dataset), and call sampler.set_epoch(epoch) each epoch.",
    )


def parts_differ(seen: Seen) -> Finding | None:
    """Compare which samples the Subset of each rank is made of."""
    passes = seen.shared
    other = next((number for number, one in enumerate(passes) if one.part != passes[0].part), None)
    counts = Counter(index for one in passes for index in set(one.indices))
    shared = sum(count > 1 for count in counts.values())
    # Ranks that cut the data into parts without overlap share it out, as a sampler would.
    if other is None or not passes[0].part or not passes[other].part or not shared:
        return None
    return Finding(
        probe="parts_differ",
        cause="each rank has cut the data in another way: a random_split or Subset that is not the same on all ranks.",
        evidence=f"the Subset of rank {other} is made of other samples than that of rank 0; {shared} samples were read by "
        f"more than one rank, and {passes[0].samples - len(counts)} of {passes[0].samples} by none.",
        remedy="cut the data alike on every rank: random_split(..., generator=torch.Generator().manual_seed(0)).",
    )


def repeated_samples(seen: Seen) -> Finding | None:
    """Count how often each sample of the first epoch was read by all ranks together; padding explains only so many."""
    passes = seen.shared
    if not passes or every_rank_all_data(seen) is not None or parts_differ(seen) is not None:
        return None
    counts = Counter(index for one in passes for index in one.indices)
    more = sum(count - 1 for count in counts.values())
    if not more:
        return None
    first = next(index for index, count in counts.items() if count > 1)
    replicas, served = passes[0].replicas, passes[0].served
    seen_twice = (
        f"{served} samples on {len(passes)} ranks: sample {first} was read more than once, "
        f"{sum(counts.values())} samples in all."
    )
    if not replicas or more != -served % replicas:
        return Finding(
            probe="repeated",
            cause=f"{more} sample(s) of the first epoch were read more than once. Why is not known: no padding explains it.",
            evidence=seen_twice,
            remedy="look at how the samples of a rank are chosen; each should be read by one rank, once an epoch.",
        )
    return Finding(
        probe="padding",
        cause=f"{more} sample(s) count twice in every epoch: {passes[0].sampler} pads the data until the ranks divide it.",
        evidence=seen_twice,
        remedy="weigh the padded samples with 0, or choose a number of workers that divides the data.",
    )


def unequal_batches(seen: Seen) -> Finding | None:
    """Compare the sizes of the batches that all ranks put into the same step."""
    for step, batches in enumerate(zip(*seen.first_pass, strict=False)):
        sizes = [len(batch) for batch in batches]
        if len(set(sizes)) > 1:
            return Finding(
                probe="mean_of_means",
                cause="the gradient is a mean of means: DDP gives every rank the same weight, whatever the size of its batch.",
                evidence=f"in step {step} the ranks have batches of {', '.join(map(str, sizes))} samples.",
                remedy="sum the losses, divide by the samples of all ranks, and multiply by WORLD_SIZE; or keep batches equal.",
            )
    return None


def same_order(seen: Seen) -> Finding | None:
    """Compare the order of two epochs of the same loader."""
    for trace in seen.many:
        by_loader: dict[int, list[list[int]]] = {}
        for one in trace.training:
            if one.shuffles:
                by_loader.setdefault(one.loader, []).append(one.indices)
        for epochs in by_loader.values():
            if len(epochs) > 1 and len(epochs[0]) > 3 and epochs[0] == epochs[1]:
                return Finding(
                    probe="same_order",
                    cause="the order of the samples is the same in every epoch: sampler.set_epoch is not called.",
                    evidence=f"rank {trace.rank} read the same {len(epochs[0])} samples in the same order in "
                    f"{sum(order == epochs[0] for order in epochs)} of {len(epochs)} epochs, through a shuffling sampler.",
                    remedy="call sampler.set_epoch(epoch) at the beginning of every epoch.",
                )
    return None


def unseeded_weights(seen: Seen) -> Finding | None:
    """Compare the weights that one process starts from with those that several start from."""
    for alone, first in zip(seen.one.wrapped, seen.many[0].wrapped, strict=False):
        name = first_other(first.before, alone.before)
        if name is not None:
            return Finding(
                probe="unseeded_weights",
                cause="the initial weights differ from run to run: no seed is set before the model is made.",
                evidence=f"{name} of rank 0 starts from other values in one process than on {len(seen.many)} workers.",
                remedy="call torch.manual_seed with a fixed number before the model is made.",
            )
    return None


def initial_weights(seen: Seen) -> Finding | None:
    """Compare the weights that each rank handed to DDP, and those it got back."""
    first = seen.many[0]
    for trace in seen.many[1:]:
        for mine, theirs in zip(first.wrapped, trace.wrapped, strict=False):
            name = first_other(mine.before, theirs.before)
            if name is None:
                continue
            hidden = mine.after == theirs.after
            return Finding(
                probe="initial_weights",
                cause="the initial weights differ between ranks"
                + (
                    "; DDP's broadcast of rank 0's hides it."
                    if hidden
                    else ", and DDP was told not to make them agree."
                ),
                evidence=f"{name} of rank {trace.rank} is not that of rank 0 when DDP is made"
                + ("; afterwards it is." if hidden else ", nor afterwards."),
                remedy="call torch.manual_seed with the same number on every rank before the model is made"
                + ("." if hidden else ", and leave init_sync alone."),
                harmless=hidden,
            )
    return None
