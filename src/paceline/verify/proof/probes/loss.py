"""Probes of the loss: is it a sum with a weight, so that it does not matter how a batch is cut?"""

from __future__ import annotations

import math

from paceline.verify.proof.evidence import ProofEvidence
from paceline.verify.report import Finding


def mean_of_means(evidence: ProofEvidence) -> Finding | None:
    """Compare the weight of three samples with the weights of one and two of them."""
    parts = evidence.first.parts
    if parts is None or math.isclose(parts.whole_weight, parts.parts_weight, rel_tol=1e-6):
        return None
    return Finding(
        probe="mean_of_means",
        cause="the loss is a mean of means: its weight does not grow with the batch, so every shard counts the same "
        "however many samples it has.",
        evidence=f"three samples at once weigh {parts.whole_weight:g}, but one and two of them weigh "
        f"{parts.parts_weight:g} together; "
        f"the mean loss is {parts.whole_total / parts.whole_weight:.6g} in one piece and "
        f"{parts.parts_total / parts.parts_weight:.6g} in two.",
        remedy="return a sum and its weight: paceline.Loss.mean(per_item) with reduction='none', or paceline.Loss(sum, number).",
    )


def interaction(evidence: ProofEvidence) -> Finding | None:
    """Compare the sum over three samples with the sums over one and two of them."""
    parts = evidence.first.parts
    if parts is None or mean_of_means(evidence) is not None:
        return None
    # Sums of three float32 numbers agree to a few roundings; bf16 models to a few of theirs.
    tolerance = 1e-3 if evidence.reference.precision == "fp32" else 5e-2
    if math.isclose(parts.whole_total, parts.parts_total, rel_tol=tolerance, abs_tol=1e-6):
        return None
    return Finding(
        probe="interaction",
        cause="the loss of a batch is not the sum of its samples' losses, so it depends on how a batch is cut into shards.",
        evidence=f"three samples at once have the loss {parts.whole_total:.6g}, one and two of them "
        f"{parts.parts_total:.6g} together (dropout and batch statistics off).",
        remedy="if samples are meant to act on one another (a contrastive loss), the shards are part of the answer: keep "
        "--shards fixed. If not, look for a mean or a normalisation over the batch.",
        harmless=True,
    )
