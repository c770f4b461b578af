"""Probes of what goes on from step to step: the learning rate and the buffers."""

from __future__ import annotations

from paceline.verify.proof.evidence import ProofEvidence
from paceline.verify.proof.record import Record, first_other
from paceline.verify.report import Finding


def schedule(evidence: ProofEvidence) -> Finding | None:
    """Check whether a learning rate changes while the loss is computed."""
    moved = next(
        (pair for one in evidence.first.attempts.values() if (pair := one.rates_moved) is not None), None
    )
    stepped = next((step.number for step in evidence.reference.steps if step.rates_moved), None)
    if moved is None and stepped is None:
        return None
    other = _first_other_rate(evidence)
    return Finding(
        probe="schedule",
        cause="the schedule is stepped by the loss function, once a batch on every rank, so the learning rate depends on how "
        "many batches a worker computes.",
        evidence=(
            f"one call of loss() took the learning rate from {moved[0]:g} to {moved[1]:g}"
            if moved
            else f"the learning rate changed during loss() in step {stepped}"
        )
        + (
            f"; at step {other[0]} the update is made with {other[2]:g} where one process has {other[1]:g}."
            if other
            else "."
        ),
        remedy="give the schedule to paceline: scheduler(self, optimizer, total_steps) in the task. It steps once a step.",
    )


def _first_other_rate(evidence: ProofEvidence) -> tuple[int, float, float] | None:
    for ranks in evidence.broken.values():
        for rank in ranks:
            for mine, theirs in zip(evidence.reference.steps, rank.steps, strict=False):
                if mine.rates and theirs.rates and mine.rates != theirs.rates:
                    return mine.number, mine.rates[0], theirs.rates[0]
    return None


def hidden(evidence: ProofEvidence) -> Finding | None:
    """Find attributes of modules, other than buffers, that a forward pass changes."""
    for notes in evidence.notes:
        for shard, attempt in notes.attempts.items():
            if not attempt.hidden or attempt.same_answer(notes.repeated[shard]):
                continue  # one that the answer does not depend on is the model's own affair
            return Finding(
                probe="hidden_state",
                cause=f"the model keeps {attempt.hidden[0]} from one forward pass to the next outside its buffers, so nobody "
                "synchronises it: every worker has its own.",
                evidence=f"the forward pass changes {attempt.hidden[0]}, and the same shard ({shard}) taken again from the same "
                "weights and buffers gives another answer.",
                remedy="register it: self.register_buffer(name, tensor), and say in the task how shards are combined: "
                "def buffers(self): return {name: 'mean'}.",
            )
    return None


def buffers(evidence: ProofEvidence) -> Finding | None:
    """Compare the buffers of all ranks after a step, and what two shards make of the same buffer."""
    for who, ranks in evidence.broken.items():
        found = _disagreement(evidence.reference, ranks)
        if found:
            step, name = found
            return _unsynchronised(
                name,
                f"after step {step} of {who} it has another value on each rank, or none that one process has.",
            )
    for who, text in evidence.failed.items():
        changed = {
            name: one.buffers[name] for one in evidence.first.attempts.values() for name in one.buffers
        }
        named = next((name for name in changed if name in text), None)
        if named is not None:
            return _unsynchronised(named, f"the forward pass changes it, and {who} said: {text}")
    return None


def _disagreement(reference: Record, ranks: list[Record]) -> tuple[int, str] | None:
    """Return the first step and buffer that differ where the weights did not differ before."""
    for number, step in enumerate(reference.steps):
        views = [rank.steps[number] for rank in ranks if number < len(rank.steps)]
        earlier = reference.steps[number - 1] if number else None
        if earlier and any(
            rank.steps[number - 1].weights != earlier.weights for rank in ranks if number <= len(rank.steps)
        ):
            return None  # other weights explain other buffers
        for view in views:
            if any(step.shard_losses.get(shard) != loss for shard, loss in view.shard_losses.items()):
                return None  # another forward pass explains other buffers
            name = first_other(step.buffers, view.buffers)
            if name is not None:
                return step.number, name
    return None


def _unsynchronised(name: str, seen: str) -> Finding:
    return Finding(
        probe="buffers",
        cause=f"the buffer {name} is changed by the forward pass and is not synchronised between workers.",
        evidence=seen,
        remedy="say in the task how shards are combined: def buffers(self): return {name: 'mean'}; "
        "or keep it out of the forward pass.",
    )
