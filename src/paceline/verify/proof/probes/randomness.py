"""Probes of randomness: seeds that depend on the rank, randomness without a seed, kernels without an order."""

from __future__ import annotations

from paceline.verify.proof.evidence import ProofEvidence
from paceline.verify.proof.probes.state import hidden
from paceline.verify.report import Finding


def seed_of_rank(evidence: ProofEvidence) -> Finding | None:
    """Compare what torch's generator was last seeded with when the loss was done."""
    for notes, shard, mine, theirs in evidence.ranks_beside_first():
        if mine.seed_left != theirs.seed_left:
            return Finding(
                probe="seed_of_rank",
                cause="the model or the loss seeds the random generator by its rank, so dropout depends on "
                "who computes a sample.",
                evidence=f"shard {shard} started from one seed on all ranks; after the loss torch's generator had been seeded "
                f"with {mine.seed_left} on rank 0 and {theirs.seed_left} on rank {notes.rank}.",
                remedy="leave out torch.manual_seed in model and loss: paceline seeds every shard of every step.",
            )
    return None


def unseeded(evidence: ProofEvidence) -> Finding | None:
    """Compute the same batch from the same weights and seeds twice in one process."""
    if hidden(evidence) is not None:
        return None
    for notes in evidence.notes:
        for shard, one in notes.attempts.items():
            two = notes.repeated[shard]
            if one.same_answer(two):
                continue
            where = one.first_module(two)
            kernel = notes.no_kernel
            return Finding(
                probe="unseeded",
                cause="the same step, taken twice in one process, gives two answers: "
                + (
                    f"{kernel} has no deterministic kernel."
                    if kernel
                    else "its randomness is not torch's, numpy's or random's."
                ),
                evidence=f"shard {shard} from the same weights, batch and seeds on rank {notes.rank}"
                + (
                    f" first differs in the output of module {where}."
                    if where
                    else " differs only in its gradients or loss."
                ),
                remedy="replace the operation, or call torch.use_deterministic_algorithms(True) where a kernel exists."
                if kernel
                else "draw from torch's default generator; clocks, os.urandom, counters and own "
                "generators have no place in a step.",
            )
    return None


def no_kernel(evidence: ProofEvidence) -> Finding | None:
    """Take the step with torch's deterministic algorithms switched on."""
    name = evidence.first.no_kernel
    if name is None or unseeded(evidence) is not None:
        return None
    return Finding(
        probe="no_kernel",
        cause=f"the operation {name} has no deterministic kernel.",
        evidence=f"torch.use_deterministic_algorithms(True) refuses {name}; taken twice here, the step gave the same bits.",
        remedy=f"replace {name} by an operation with a deterministic kernel; until then the same bits are not promised.",
        harmless=True,
    )
