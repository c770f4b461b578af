"""How far two sets of weights lie apart, and how far rounding alone can push them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tests.contract.strategies import Case

Weights = Mapping[str, Tensor]


def distance(left: Weights, right: Weights) -> float:
    """Give the largest difference between two weights of the same name."""
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)


def bound(additions: int, steps: int, *, gain: float) -> float:
    """Give how far apart `steps` updates can come whose gradients were summed in another order.

    A sum of `additions` float32 terms, each at most G, depends on their order by at most additions * eps * G
    (eps = 2^-23). The tasks' gradients are means of cross-entropies over features of size 4 at most: G = 4.
    `gain` is by how much an optimizer multiplies a change of the gradient in the long run:
    lr / (1 - momentum) for SGD; lr / eps for Adam, whose update is m / (sqrt(v) + eps). Each update also
    rounds the weight (below 4 in size) itself, once a side. That adds up over the steps; a model that is
    already elsewhere by a rounding has another gradient by as little, which at these rates at most doubles it.
    """
    epsilon = torch.finfo(torch.float32).eps
    return 2 * steps * epsilon * 4 * (additions * gain + 1)


def assert_same(case: Case, left: Weights, right: Weights, limit: float) -> None:
    """Compare as strictly as the strategy promises."""
    assert left.keys() == right.keys()
    if case.bitwise:
        assert all(torch.equal(left[name], right[name]) for name in left)
    else:
        assert distance(left, right) <= limit
