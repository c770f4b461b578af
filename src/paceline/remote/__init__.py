"""Calls between workers: services, references to what stays elsewhere, gradients that cross workers, batching.

The names load their module on first use: a launcher reads roles without loading torch.
"""

from typing import TYPE_CHECKING

from paceline import lazy

if TYPE_CHECKING:
    from paceline.remote.autograd import BackwardPass, Optimizer, backward_pass
    from paceline.remote.batching import batched
    from paceline.remote.calls import Future, Method, method, wait_all
    from paceline.remote.counted_references import Reference, reference
    from paceline.remote.joining import join
    from paceline.remote.names import Roles
    from paceline.remote.pipeline import Pipeline
    from paceline.remote.proxy import call, create, peer, service_of
    from paceline.remote.reference_report import HeldReference, references
    from paceline.remote.registry import allow, function, idempotent, service
    from paceline.remote.roles import Role
    from paceline.remote.rollouts import Rollouts
    from paceline.remote.session import Session, current

__all__ = [
    "BackwardPass",
    "Future",
    "HeldReference",
    "Method",
    "Optimizer",
    "Pipeline",
    "Reference",
    "Role",
    "Roles",
    "Rollouts",
    "Session",
    "allow",
    "backward_pass",
    "batched",
    "call",
    "create",
    "current",
    "function",
    "idempotent",
    "join",
    "method",
    "peer",
    "reference",
    "references",
    "service",
    "service_of",
    "wait_all",
]

__getattr__, __dir__ = lazy.names(
    __name__,
    {
        "BackwardPass": "paceline.remote.autograd",
        "Future": "paceline.remote.calls",
        "HeldReference": "paceline.remote.reference_report",
        "Method": "paceline.remote.calls",
        "Optimizer": "paceline.remote.autograd",
        "Pipeline": "paceline.remote.pipeline",
        "Reference": "paceline.remote.counted_references",
        "Role": "paceline.remote.roles",
        "Roles": "paceline.remote.names",
        "Rollouts": "paceline.remote.rollouts",
        "Session": "paceline.remote.session",
        "allow": "paceline.remote.registry",
        "backward_pass": "paceline.remote.autograd",
        "batched": "paceline.remote.batching",
        "call": "paceline.remote.proxy",
        "create": "paceline.remote.proxy",
        "current": "paceline.remote.session",
        "function": "paceline.remote.registry",
        "idempotent": "paceline.remote.registry",
        "join": "paceline.remote.joining",
        "method": "paceline.remote.calls",
        "peer": "paceline.remote.proxy",
        "reference": "paceline.remote.counted_references",
        "references": "paceline.remote.reference_report",
        "service": "paceline.remote.registry",
        "service_of": "paceline.remote.proxy",
        "wait_all": "paceline.remote.calls",
    },
)
