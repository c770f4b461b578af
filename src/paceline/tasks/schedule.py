"""The learning-rate schedule the built-in tasks share: a linear warm-up, then half a cosine down to zero."""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def warmup_cosine(optimizer: Optimizer, total_steps: int | None, *, warmup: float = 0.1) -> LambdaLR | None:
    """Return a linear warm-up over the fraction `warmup` of the steps, then a cosine to zero; None without a total.

    A LambdaLR, because its saved state holds no total: a resumed run may be given more steps than the first.
    """
    if total_steps is None:
        return None
    rising = max(1, round(total_steps * warmup))
    falling = max(1, total_steps - rising)

    def factor(step: int) -> float:
        if step < rising:
            return (step + 1) / rising
        done = min(1.0, (step - rising) / falling)
        return 0.5 * (1.0 + math.cos(math.pi * done))

    return LambdaLR(optimizer, factor)
