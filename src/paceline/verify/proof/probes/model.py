"""Probes of the model: what it starts from, and whether it knows which rank it is."""

from __future__ import annotations

from paceline.verify.proof.evidence import ProofEvidence
from paceline.verify.proof.record import first_other
from paceline.verify.report import Finding


def initial_weights(evidence: ProofEvidence) -> Finding | None:
    """Compare the model as every process made it."""
    first, again = evidence.first, evidence.again
    if again is not None and again.made != first.made:
        name = first_other(first.made, again.made)
        return Finding(
            probe="initial_weights",
            cause="the initial weights differ from process to process: model() uses randomness that no seed governs.",
            evidence=f"{name} is another tensor in each of two processes, both of rank 0, though torch, numpy and random "
            "were seeded alike before model().",
            remedy="draw from torch's generator in model(); clocks, os.urandom and generators of your own are not seeded.",
            harmless=not evidence.wrong,
        )
    for notes in evidence.notes[1:]:
        if notes.made != first.made:
            name = first_other(first.made, notes.made)
            return Finding(
                probe="initial_weights",
                cause="the initial weights differ between ranks: model() depends on the rank.",
                evidence=f"{name} of rank {notes.rank} is not that of rank 0. ddp overwrites it with rank 0's, which hides this.",
                remedy="make the model without looking at RANK or torch.distributed; paceline seeds torch beforehand.",
                harmless=not evidence.wrong,
            )
    return None


def reads_rank(evidence: ProofEvidence) -> Finding | None:
    """Compute the same batch from the same weights and seeds on every rank."""
    if not evidence.repeatable or not evidence.reproducible:
        return None
    for notes, shard, mine, theirs in evidence.ranks_beside_first():
        if notes.step_data.get(shard) != evidence.first.step_data[shard]:
            continue  # another batch explains another loss
        if theirs.seed_left != mine.seed_left or theirs.totals == mine.totals:
            continue  # a seed of its own explains it
        where = mine.first_module(theirs)
        place = f"in module {where}" if where else "outside every module, in the loss function"
        return Finding(
            probe="reads_rank",
            cause=f"the model or the loss reads its rank, {place}.",
            evidence=f"the same batch, weights and seeds give the loss {_number(mine.totals)} on rank 0 and "
            f"{_number(theirs.totals)} on rank {notes.rank}; each rank repeats its own to the bit.",
            remedy="compute the same on every rank: take RANK, LOCAL_RANK and torch.distributed.get_rank() out of it.",
        )
    return None


def _number(totals: tuple[str, ...]) -> str:
    return ", ".join(f"{float.fromhex(total):.6g}" for total in totals[:3])
