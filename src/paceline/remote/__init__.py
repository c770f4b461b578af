"""Calls between workers: services, references to what stays elsewhere, gradients that cross workers, batching."""

from __future__ import annotations

from paceline.remote.autograd import BackwardPass, Optimizer, backward_pass
from paceline.remote.batching import batched
from paceline.remote.calls import Future, Method, method, wait_all
from paceline.remote.holdings import Holding, references
from paceline.remote.names import Roles
from paceline.remote.pipeline import Pipeline
from paceline.remote.proxy import call, create, peer, service_of
from paceline.remote.references import Reference, reference
from paceline.remote.registry import allow, function, idempotent, service
from paceline.remote.session import Session, current

__all__ = [
    "BackwardPass",
    "Future",
    "Holding",
    "Method",
    "Optimizer",
    "Pipeline",
    "Reference",
    "Roles",
    "Session",
    "allow",
    "backward_pass",
    "batched",
    "call",
    "create",
    "current",
    "function",
    "idempotent",
    "method",
    "peer",
    "reference",
    "references",
    "service",
    "service_of",
    "wait_all",
]
