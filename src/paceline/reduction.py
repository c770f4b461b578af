"""Finds a mean where a sum belongs, by what autograd remembers of how a number was made.

`Loss(F.cross_entropy(scores, labels), len(labels))` is a mean under the name of a sum: its gradient is too small by the
number of items, and nothing fails. The last operation of a tensor names itself, so the usual ways to take a mean are seen
for about a microsecond. What hides it (a product, a compiled region, a function of one's own) is not looked through:
`mean * count` is a sum. Where right code may look the same for some size of a batch, it is left alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_MEANS = frozenset({"MeanBackward0", "MeanBackward1", "DivBackward1"})
"""`mean()`, and the division that torch's own losses end with; a division in Python is DivBackward0."""
_SAME_VALUE = frozenset(
    {
        "ToCopyBackward0",
        "SqueezeBackward0",
        "UnsqueezeBackward0",
        "ViewBackward0",
        "CloneBackward0",
        "AliasBackward0",
        "MulBackward1",  # a factor in torch's own losses
    }
)
_SUMS = frozenset({"SumBackward0", "NansumBackward0", "DotBackward0"})
_MEAN = 1
"""The number of `reduction="mean"` in torch's losses; 2 is "sum"."""
_MOST_ADDENDS = 3
"""Terms of a loss that are told from items which a loop adds up one by one: more are items."""
_LEAST_COUNT = 3
"""Where a divisor that equals the number of items may be one: half a squared error is a sum for two items too."""


def is_mean(total: Tensor, weight: object) -> bool:
    """Return whether a total was made as a mean over the items that its weight counts, alone or with other terms added.

    A weight of 1 is one item, or a term that counts once for each batch. Where there are as many addends as the weight says,
    each is one item (a sequence, say), and their sum is a sum.
    """
    if total.grad_fn is None or (isinstance(weight, int | float) and weight <= 1):
        return False
    addends = []
    for node in _addends(total.grad_fn):
        addends.append(node)
        if len(addends) > _MOST_ADDENDS:
            return False
    if len(addends) == 1 or _is_smoothed(total.grad_fn):
        return any(_takes_mean(node, weight) for node in addends)
    if not isinstance(weight, int | float) or weight <= len(addends):
        return False
    return any(node is not None and _takes_mean(node, weight) for node in addends)


def _addends(node: Any) -> Iterator[Any]:
    """Yield the operations whose values are added up to this one; None for a value without a gradient."""
    waiting = [node]
    while waiting:
        one = waiting.pop()
        children = [] if one is None else [child for child, _ in one.next_functions]
        if one is not None and one.name() in _SAME_VALUE and len(children) == 1 and children[0] is not None:
            waiting.append(children[0])
        elif one is not None and one.name() == "AddBackward0":
            waiting += children
        else:
            yield one


def _is_smoothed(node: Any) -> bool:
    """Return whether this is torch's cross entropy with smoothed labels, which adds two parts with factors of its own."""
    return node.name() == "AddBackward0" and all(
        child is not None and child.name() == "MulBackward1" for child, _ in node.next_functions
    )


def _takes_mean(node: Any, weight: object) -> bool:
    name = node.name()
    if name in _MEANS or getattr(node, "_saved_reduction", None) == _MEAN:
        return True
    return name == "DivBackward0" and _divides_by_count(node, weight)


def _divides_by_count(node: Any, weight: object) -> bool:
    """Return whether a sum is divided by the very weight that it is given with."""
    summed, divisor = node.next_functions[0][0], node._saved_other  # noqa: SLF001 - what autograd saved has no other name
    if summed is None or summed.name() not in _SUMS or divisor is None or divisor.dim():
        return False
    if isinstance(weight, Tensor):
        if weight.data_ptr() == divisor.data_ptr():
            return True
        weight = weight.item() if weight.device.type == "cpu" and weight.dtype == divisor.dtype else None
        alike = True
    else:
        # Of a number in Python only a whole one is a count, and only where there are as many items.
        alike = divisor.dtype not in (torch.int64, torch.float64) or (
            divisor.dtype == torch.int64 and weight in _counts(summed)
        )
    if not isinstance(weight, int | float) or weight < _LEAST_COUNT or divisor.device.type != "cpu":
        return False  # to ask a device would make it wait
    return alike and bool(divisor.item() == weight)


def _counts(summed: Any) -> set[int]:
    """Return how many items a sum may have been taken over."""
    sizes = getattr(summed, "_saved_self_sym_sizes", None)
    if sizes is None:
        sizes = summed._saved_self.shape  # noqa: SLF001
    product = 1
    for size in sizes:
        product *= size
    return {*tuple(sizes)[:1], product}
