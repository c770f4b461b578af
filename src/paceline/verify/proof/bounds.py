"""How large a difference rounding alone can explain. Imports no torch.

A numeric promise is held to two bounds, both on the relative difference of all tensors of a kind taken as one
vector (the length of the difference over the length of the reference's):

- Where a run first differs from the reference, its gradient is within 1e-5. The weights are still the same there,
  so only the order of additions differs: 84 roundings of float32 leave room for some cancellation. (Measured on
  the built-in tasks: 1e-7.) A wrong gradient is far outside: one lost sample of 64 changes it by about 1e-2.
- After step k (counted from 0) weights and loss are within 1e-5 + 5e-6 k: 1.05e-4 after 20 steps. Each update
  adds a rounding, and an adaptive optimizer enlarges the ones of gradients near zero, so a difference may grow
  with every step; one that grows faster than linearly feeds on itself, and that is a divergence.

Taken one by one, tensors would say less: a bias whose true gradient is zero gets nothing but rounding for one,
and Adam makes steps of full size of it. Under bf16 and fp16 each operation rounds to 8 or 11 bits, which averages
out over a batch: the bounds are 200 times wider. Where weights or gradients are only sent so (--fsdp-dtype, --compress),
each worker's part is rounded as a whole, by up to 2e-3 of itself, and parts may cancel to a fifth: the first gradient
is within 1e-2 there.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST, GROWTH = 1e-5, 5e-6
HALF_PRECISION = 200.0
SENT_GRADIENT = 1e-2
SENT = "sent as "
"""What the name of a precision begins with where it is only that of the exchange."""


def bound(step: int, precision: str, kind: str = "weight") -> float:
    """Return the largest relative difference that a numeric promise allows after `step` earlier steps."""
    limit = (FIRST + GROWTH * step) * (1.0 if precision == "fp32" else HALF_PRECISION)
    return max(limit, SENT_GRADIENT) if kind == "gradient" and precision.startswith(SENT) else limit


@dataclass(frozen=True, kw_only=True)
class Size:
    """The difference of all tensors of one kind in one step."""

    step: int
    kind: str
    name: str
    """The tensor that has the largest part in it."""
    relative: float
    absolute: float
    """The largest single difference."""
