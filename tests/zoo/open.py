"""Cells that do not end as they should yet. The part that CI runs leaves them out; this table is meant to be empty."""

from __future__ import annotations

from fnmatch import fnmatchcase

OPEN = {
    "adagrad@fsdp-*": "state made in the optimizer's constructor",
    "accumulation-hooks@pp-*": "not refused",
    "direct@[ft]*": "a loss that uses parameters directly",
    "recomputed-reentrant@pp-*": "refused for a reason that is not true",
    "spectral-norm-old@tp-*": "its hook mixes kinds of tensors",
    "encoder-masked@[fp]*": "the fast path of evaluation",
    "gradient-hooks@[flpht]*": "hooks of parameters",
    "max-norm@fsdp-*": "weights changed in the forward pass",
    "max-norm@ps-*": "weights changed in the forward pass",
    "max-norm@local-sgd-*": "weights changed in the forward pass",
    "methods@fsdp-*": "a loss that calls other methods",
    "outside@p*": "not refused",
    "sparse*@*": "sparse gradients",
    "weight-norm-old@tp-*": "mixes kinds of tensors",
}
"""Cells, patterns allowed, and what is wrong there."""


def is_open(cell: str) -> bool:
    """Return whether a cell is known not to end well."""
    return any(fnmatchcase(cell, pattern) for pattern in OPEN)
