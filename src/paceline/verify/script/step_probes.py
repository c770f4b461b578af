"""Probes of a script's steps: learning rates, clipping, gradients that never met, randomness that cannot agree."""

from __future__ import annotations

from paceline.verify.proof.record import first_other
from paceline.verify.report import Finding
from paceline.verify.script.probes import Seen


def schedule(seen: Seen) -> Finding | None:
    """Compare the learning rates of the same step on all ranks, and in one process."""
    for rank, number, mine, theirs in seen.steps_beside_first():
        if mine.rates != theirs.rates:
            return Finding(
                probe="schedule",
                cause="the schedule is not stepped alike on all ranks.",
                evidence=f"in step {number} the learning rate is {mine.rates[0]:g} on rank 0 and {theirs.rates[0]:g} on "
                f"rank {rank}.",
                remedy="call scheduler.step() on every rank, once an optimizer step (or once an epoch).",
            )
    first = seen.many[0]
    if len(seen.one.steps) != len(first.steps):
        return None
    for number, (alone, mine) in enumerate(zip(seen.one.steps, first.steps, strict=True)):
        if alone.rates != mine.rates:
            return Finding(
                probe="schedule",
                cause="the schedule depends on the number of workers.",
                evidence=f"in step {number} the learning rate is {alone.rates[0]:g} in one process and {mine.rates[0]:g} on "
                f"{len(seen.many)} workers.",
                remedy="step the schedule once an optimizer step, and lay it out for the steps that the run really makes.",
            )
    return None


def clipped_early(seen: Seen) -> Finding | None:
    """Check whether the gradients that a clipping function is given agree on all ranks: only then are they reduced."""
    for trace in seen.many:
        if trace.bent_hooks:
            return _clipping(
                f"the gradient hook of {trace.bent_hooks[0]} is not linear, and hooks run before DDP reduces."
            )
    for rank, number, mine, theirs in seen.steps_beside_first():
        for here, there in zip(mine.clipped, theirs.clipped, strict=False):
            name = first_other(here, there)
            if name is not None:
                return _clipping(
                    f"in step {number} clip_grad_norm_ found another gradient of {name} on rank {rank} than on rank 0."
                )
    return None


def _clipping(seen: str) -> Finding:
    return Finding(
        probe="clipped_early",
        cause="gradients are clipped before they are reduced: each rank clips its own part, not the whole.",
        evidence=seen,
        remedy="clip once, after the last loss.backward() outside no_sync() and before optimizer.step().",
    )


def scaled(seen: Seen) -> Finding | None:
    """Check whether the first gradient is one process's times the number of workers, or divided by it."""
    workers = len(seen.many)
    for factor, words in ((1 / workers, f"1/{workers} of"), (float(workers), f"{workers} times")):
        if seen.multiple is not None and abs(seen.multiple / factor - 1) < 1e-4:
            return Finding(
                probe="scaled",
                cause=f"the gradient is exactly {words} one process's: "
                + (
                    "the loss is a sum divided by a number that is the same on any number of workers, and DDP averages it."
                    if factor < 1
                    else "the gradients of the ranks are summed, and each is a mean already."
                ),
                evidence=f"in step 0 every tensor of the gradient is one process's times {seen.multiple:.6g}.",
                remedy="multiply the loss by WORLD_SIZE, or divide by the samples of this rank alone."
                if factor < 1
                else "divide the summed gradients by WORLD_SIZE.",
            )
    return None


def not_reduced(seen: Seen) -> Finding | None:
    """Compare the gradients that every rank's optimizer takes."""
    for rank, number, mine, theirs in seen.steps_beside_first():
        name = first_other(mine.gradients, theirs.gradients)
        if name is None:
            continue
        wrapped = any(one.wrapped for one in seen.many)
        return Finding(
            probe="not_reduced",
            cause="the ranks update with different gradients, so their models drift apart.",
            evidence=f"in step {number} the gradient of {name} is not the same on rank 0 and rank {rank}; "
            + ("DDP was in use." if wrapped else "no model was wrapped in DistributedDataParallel."),
            remedy="call the DDP module (not .module), and make the last backward of a step outside no_sync()."
            if wrapped
            else "wrap the model: DistributedDataParallel(model).",
        )
    return None


def steps_differ(seen: Seen) -> Finding | None:
    """Count the optimizer steps."""
    counts = sorted({len(trace.steps) for trace in seen.many})
    if counts == [len(seen.one.steps)]:
        return None
    return Finding(
        probe="steps",
        cause="the number of optimizer steps depends on the number of workers.",
        evidence=f"one process makes {len(seen.one.steps)} steps, {len(seen.many)} workers make "
        f"{' or '.join(map(str, counts))} each.",
        remedy="share the data out, and divide the batch size by WORLD_SIZE, so that a step covers the same samples.",
    )


def rows_differ(seen: Seen) -> Finding | None:
    """Count the rows that the first step is made of."""
    alone, together = seen.one.steps[0].rows, sum(trace.steps[0].rows for trace in seen.many if trace.steps)
    if not alone or not together or alone == together:
        return None
    return Finding(
        probe="rows",
        cause="a step covers other samples than one process's step does.",
        evidence=f"the model is called with {together} rows by {len(seen.many)} workers together in step 0, "
        f"and with {alone} by one.",
        remedy="share one global batch out: the same samples in a step, whatever the number of workers.",
    )


def randomness(seen: Seen) -> Finding | None:
    """Find layers whose result depends on who computes which sample."""
    wrapped = [one for trace in seen.many for one in trace.wrapped]
    dropout = next((one.dropout for one in wrapped if one.dropout), [])
    statistics = next((one.batch_statistics for one in wrapped if one.batch_statistics), [])
    if not dropout and not statistics:
        return None
    what = (
        "dropout draws its own numbers on every rank"
        if dropout
        else "batch statistics are those of a rank's own part"
    )
    return Finding(
        probe="randomness",
        cause=f"{what}, so this script cannot give one process's answer.",
        evidence=f"the wrapped model has {', '.join((dropout + statistics)[:3])}.",
        remedy="compare with dropout 0 and SyncBatchNorm (or GroupNorm); as a paceline task both would agree.",
        harmless=True,
    )
