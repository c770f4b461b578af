"""Cells that do not end as they should yet. The part that CI runs leaves them out; this table is meant to be empty."""

from __future__ import annotations

from fnmatch import fnmatchcase

OPEN = {
    "adagrad@fsdp-*": "state made in the optimizer's constructor",
    "auxiliary-only@*": "parameters that an auxiliary term alone reaches",
    "complex@*": "complex parameters with more shards than workers",
    "accumulation-hooks@pp-*": "not refused",
    "direct@*": "a loss that uses parameters directly",
    "recomputed-reentrant@pp-*": "refused for a reason that is not true",
    "spectral-norm-old@tp-*": "its hook mixes kinds of tensors",
    "encoder-masked@*": "the fast path of evaluation",
    "encoder@*": "the fast path of evaluation",
    "experts@*": "auxiliary terms and unused parameters",
    "gradient-hooks@*": "hooks of parameters",
    "max-norm@*": "weights changed in the forward pass",
    "methods@*": "a loss that calls other methods",
    "outside@p*": "not refused",
    "outside@zero-*": "not refused",
    "spectral-norm@tp-*": "the proof of the plan moves its buffers",
    "sparse*@*": "sparse gradients",
    "stream@*:resume": "samples of a resumed stream",
    "weight-norm-old@*": "cannot be copied, mixes kinds of tensors",
}
"""Cells, patterns allowed, and what is wrong there."""


def is_open(cell: str) -> bool:
    """Return whether a cell is known not to end well."""
    return any(fnmatchcase(cell, pattern) for pattern in OPEN)
