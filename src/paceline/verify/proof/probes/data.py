"""Probes of what is read: items that change, order by hash, ranks that read otherwise, batches changed in place."""

from __future__ import annotations

from paceline.verify.proof.differences import Difference, first_difference
from paceline.verify.proof.evidence import ProofEvidence
from paceline.verify.proof.record import Record, first_other
from paceline.verify.report import Finding


def unstable_items(evidence: ProofEvidence) -> Finding | None:
    """Read the same samples twice in one process."""
    for notes in evidence.notes:
        shard = first_other(notes.data, notes.data_again)
        if shard is not None:
            return Finding(
                probe="unstable_items",
                cause="the training data changes from one reading to the next: __getitem__ (or the stream, or collate) is "
                "not a function of the sample.",
                evidence=f"the samples of shard {shard} of the first step, read twice in one process (rank {notes.rank}), "
                "gave different batches.",
                remedy="let a sample depend on its index alone. Random augmentation may use torch, numpy or random: those are "
                "seeded for each sample. Clocks, os.urandom, counters and generators of the data set's own are not.",
            )
    return None


def hash_order(evidence: ProofEvidence) -> Finding | None:
    """Take the first steps in a process with another hash seed."""
    if evidence.hashed is None or not evidence.repeatable or not evidence.reproducible:
        return None
    difference = evidence.hashed
    return Finding(
        probe="hash_order",
        cause="something iterates over a set (or a dict made from one), whose order changes with Python's hash seed.",
        evidence="one process with another PYTHONHASHSEED differs from the reference at "
        f"{difference}; processes with the same hash seed agree.",
        remedy="sort before iterating: sorted(the_set). (PYTHONHASHSEED=0 on every machine hides it, and only there.)",
    )


def differs_between_ranks(evidence: ProofEvidence) -> Finding | None:
    """Read the same samples on every rank."""
    if unstable_items(evidence) is not None:
        return None
    first = evidence.first
    for notes in evidence.notes[1:]:
        if notes.samples != first.samples:
            seen = f"rank {first.rank} has {first.samples} samples, rank {notes.rank} has {notes.samples}"
        elif notes.data != first.data:
            shard = first_other(first.data, notes.data)
            seen = f"the same samples (shard {shard} of the first step) are other values on rank {notes.rank} than on rank 0"
        else:
            continue
        if evidence.reproducible:
            return Finding(
                probe="data_of_rank",
                cause="the training data differs between ranks: train_data() depends on the rank.",
                evidence=f"{seen}; another process with rank 0 reads what rank 0 read.",
                remedy="give every worker the whole data set. paceline deals it out; train_data() must not read RANK.",
            )
        break
    return _differs_between_processes(evidence)


def _differs_between_processes(evidence: ProofEvidence) -> Finding | None:
    again = evidence.again
    if again is None or (again.samples == evidence.first.samples and again.data == evidence.first.data):
        return None
    return Finding(
        probe="data_of_process",
        cause="the training data differs from process to process: train_data() makes it with randomness that no seed governs.",
        evidence="two processes of rank 0 read different values for the same samples; within each they are stable.",
        remedy="seed the generator that makes the data (torch.Generator().manual_seed(0)), or read the data from a file.",
    )


def changed_in_place(evidence: ProofEvidence) -> Finding | None:
    """Hash every batch before and after the loss."""
    found = _changed(evidence.reference) or next(
        (place for ranks in evidence.broken.values() for rank in ranks if (place := _changed(rank))), None
    )
    if found is None:
        return None
    step, shard = found
    stored = any(one.kind == "data" for one in _differences(evidence))
    return Finding(
        probe="changed_in_place",
        cause="the loss or the model changes its batch in place"
        + (
            ", and with it the data set's own tensors: a worker that reads the sample later reads another one."
            if stored
            else "."
        ),
        evidence=f"step {step}, shard {shard}: the batch has another digest after loss() than before."
        + (" Later the same samples have other values in the runs compared." if stored else ""),
        remedy="work on a copy: x = x * 2 in place of x.mul_(2); or clone the sample in __getitem__.",
        harmless=not stored,
    )


def _changed(record: Record) -> tuple[int, int] | None:
    return next(((step.number, step.changed[0]) for step in record.steps if step.changed), None)


def _differences(evidence: ProofEvidence) -> list[Difference]:
    found = [first_difference(evidence.reference, ranks) for ranks in evidence.broken.values()]
    return [one for one in found if one is not None]


def same_order(evidence: ProofEvidence) -> Finding | None:
    """Compare the batches of the first two epochs that the reference went through."""
    by_epoch: dict[int, list[tuple[object, ...]]] = {}
    for step in evidence.reference.steps:
        by_epoch.setdefault(step.epoch, []).append((*step.data.values(), *step.samples.values()))
    if len(by_epoch) < 2 or len(by_epoch[0]) < 2:
        return None
    seen = min(len(by_epoch[0]), len(by_epoch[1]))
    # One batch alone may be the same by chance where the data is small.
    if seen < 2 or by_epoch[0][:seen] != by_epoch[1][:seen]:
        return None
    return Finding(
        probe="same_order",
        cause="the order of the samples is the same in every epoch.",
        evidence=f"the first {seen} batches of epoch 1 are, to the bit, those of epoch 0.",
        remedy="a stream orders itself: shuffle in __iter__ with torch, numpy or random, which are seeded anew each epoch; "
        "or give a map-style data set, which paceline shuffles.",
        harmless=True,
    )
