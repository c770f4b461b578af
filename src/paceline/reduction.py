"""Finds a mean where a sum belongs, by what autograd remembers of how a number was made.

`Loss(F.cross_entropy(scores, labels), len(labels))` is a mean under the name of a sum: its gradient is too small by the
number of items, and nothing fails. The last operation of a tensor names itself, so the usual ways to take a mean are seen
for about a microsecond. What hides it (a product, a compiled region, a function of one's own) is not looked through:
`mean * count` is a sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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
    }
)
_MEAN = 1
"""The number of `reduction="mean"` in torch's losses; 2 is "sum"."""
_DEPTH = 8
"""Additions that are looked through; code that adds more has items of its own."""


def is_mean(total: Tensor, weight: object) -> bool:
    """Return whether a total was made as a mean, alone or with other terms added to it.

    Where there are as many addends as the weight says, each is one item (a sequence, say), and their sum is a sum.
    """
    if total.grad_fn is None:
        return False
    addends = list(_addends(total.grad_fn, _DEPTH))
    if not any(_takes_mean(node, weight) for node in addends):
        return False
    several = total.grad_fn.name() == "AddBackward0"
    return not (several and isinstance(weight, int | float) and weight == len(addends))


def _addends(node: Any, depth: int) -> Iterator[Any]:
    """Yield the operations whose values are added up to this one."""
    name = node.name()
    if (
        name in _SAME_VALUE or name == "MulBackward1" or _sums_one(node, name)
    ):  # the second: a factor in torch's own losses
        children = [child for child, _ in node.next_functions if child is not None]
        if len(children) == 1:
            yield from _addends(children[0], depth)
            return
    if name == "AddBackward0" and depth:
        for child, _ in node.next_functions:
            if child is not None:
                yield from _addends(child, depth - 1)
        return
    yield node


def _sums_one(node: Any, name: str) -> bool:
    return name == "SumBackward0" and _product(tuple(node._saved_self_sym_sizes)) == 1  # noqa: SLF001


def _takes_mean(node: Any, weight: object) -> bool:
    name = node.name()
    if name == "MeanBackward1" and _leaves_items(node):
        return False
    if name in _MEANS or getattr(node, "_saved_reduction", None) == _MEAN:
        return True
    return name == "DivBackward0" and _divides_by_count(node, weight)


def _leaves_items(node: Any) -> bool:
    """Return whether a mean over some dimensions leaves others: it is taken within each item, and there may be one item."""
    sizes, over = tuple(node._saved_self_sym_sizes), tuple(node._saved_dim)  # noqa: SLF001
    return not node._saved_keepdim and len(over or sizes) < len(sizes)  # noqa: SLF001


def _divides_by_count(node: Any, weight: object) -> bool:
    """Return whether a sum is divided by the number of its addends, or by the weight that it is given with."""
    summed = node.next_functions[0][0]
    divisor = node._saved_other  # noqa: SLF001 - what autograd saved has no other name
    if summed is None or summed.name() != "SumBackward0" or divisor is None or divisor.dim():
        return False
    if divisor.device.type != "cpu":
        return False  # asking would make the device wait
    sizes = tuple(summed._saved_self_sym_sizes)  # noqa: SLF001
    counts = {sizes[0], _product(sizes)} if sizes else set()
    if isinstance(weight, int | float):
        counts.add(weight)
    return divisor.item() in counts - {1}


def _product(sizes: tuple[int, ...]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product
