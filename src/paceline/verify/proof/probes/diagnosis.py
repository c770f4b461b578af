"""Asks every probe in turn. What nothing speaks for is ruled out by name, so that the user need not look there."""

from __future__ import annotations

from collections.abc import Callable

from paceline.verify.proof.evidence import ProofEvidence
from paceline.verify.proof.probes import data, gradients, loss, model, randomness, state
from paceline.verify.report import Finding

Probe = Callable[[ProofEvidence], Finding | None]

PROBES: list[tuple[str, Probe]] = [
    ("data that changes from one reading to the next", data.unstable_items),
    ("an order that depends on the hash seed (a set, or a dict made from one)", data.hash_order),
    ("data that differs between ranks", data.differs_between_ranks),
    ("a batch changed in place", data.changed_in_place),
    ("an order that is the same every epoch", data.same_order),
    ("initial weights that differ between ranks or processes", model.initial_weights),
    ("a state that the model keeps outside its buffers", state.hidden),
    ("a random seed that depends on the rank", randomness.seed_of_rank),
    ("randomness that no seed governs", randomness.unseeded),
    ("an operation without a deterministic kernel", randomness.no_kernel),
    ("a model or loss that reads its rank", model.reads_rank),
    ("a loss that is a mean of means", loss.mean_of_means),
    ("samples of a batch that act on one another", loss.interaction),
    ("a parameter that some shards do not use", gradients.unused),
    ("gradients clipped before they are combined", gradients.clipped_early),
    ("a schedule stepped by the loss function", state.schedule),
    ("a buffer that is not synchronised", state.buffers),
]


def diagnose(evidence: ProofEvidence) -> tuple[list[Finding], list[str]]:
    """Return what was found, from cause to symptom, and what was ruled out."""
    findings: list[Finding] = []
    cleared: list[str] = []
    for name, probe in PROBES:
        found = probe(evidence)
        if found is None:
            cleared.append(name)
        else:
            findings.append(found)
    return findings, cleared
