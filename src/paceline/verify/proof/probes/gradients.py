"""Probes of the gradients: parameters without one, and clipping where only a part of the batch is known."""

from __future__ import annotations

from paceline.verify.proof.evidence import ProofEvidence
from paceline.verify.report import Finding


def unused(evidence: ProofEvidence) -> Finding | None:
    """Find the parameter that a failed run names among those that some shards' losses do not depend on."""
    used: dict[str, int] = {}
    missing: dict[str, int] = {}
    for notes in evidence.notes:
        for shard, attempt in notes.attempts.items():
            missing |= {name: shard for name in attempt.unused if name not in missing}
            used |= {name: shard for name in attempt.gradients if name not in used}
    for who, text in evidence.failed.items():
        name = next((name for name in missing if name in text), None)
        if name is None:
            continue
        seen = f"no gradient in shard {missing[name]}" + (
            f", but one in shard {used[name]}" if name in used else ""
        )
        return Finding(
            probe="unused",
            cause=f"the parameter {name} is not used by every worker in every step.",
            evidence=f"it gets {seen}. {who} said: {text}",
            remedy="set find_unused_parameters = True in the task if that is meant; else use it in every forward pass.",
        )
    return None


def clipped_early(evidence: ProofEvidence) -> Finding | None:
    """Start the backward pass from a much larger number; a linear one only grows."""
    notes = evidence.first
    names = notes.touched or notes.bent
    if not names or not evidence.repeatable:
        return None
    seen = (
        f"loss() itself changes the .grad of {names[0]} before any backward pass"
        if notes.touched
        else f"starting the backward pass from a 2^20 times larger number does not give 2^20 times the gradient of {names[0]}"
    )
    return Finding(
        probe="clipped_early",
        cause="gradients are clipped (or otherwise bent) before they are combined: each worker clips its part, not the sum.",
        evidence=f"{seen} (and {len(names) - 1} more)." if len(names) > 1 else f"{seen}.",
        remedy="take clip_grad_norm_, clamp and clipping hooks out of model and loss, and set max_grad_norm = LIMIT in the task: "
        "paceline clips the true global gradient.",
    )
