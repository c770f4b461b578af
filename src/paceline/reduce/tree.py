"""One tree of additions: the order in which the gradients of V shards are summed, whoever holds them.

Floating-point addition is not associative, so the sum over shards is always taken along the same binary tree
over [0, V). Sums arrive from left to right; a stack keeps the roots of the complete subtrees so far, at most
log2(V) + 1 of them at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import zip_longest

from torch import Tensor

from paceline.compat import foreach

Subtree = tuple[int, int]
Gradients = list[Tensor | None]
Add = Callable[[Gradients, Gradients], Gradients]


@lru_cache(maxsize=64)
def splits(shards: int) -> dict[Subtree, int]:
    """Map each inner node [low, high) of the tree over `shards` leaves to the place where its halves meet."""
    table: dict[Subtree, int] = {}
    todo = [(0, shards)]
    while todo:
        low, high = todo.pop()
        if high - low > 1:
            # The left half is the largest power of two that leaves something for the right one.
            middle = low + (1 << (high - low - 1).bit_length() - 1)
            table[low, high] = middle
            todo += [(low, middle), (middle, high)]
    return table


@lru_cache(maxsize=1024)
def cover(low: int, high: int, shards: int) -> list[Subtree]:
    """Return the fewest nodes of the tree that make up the shards [low, high), from left to right."""

    def walk(node: Subtree) -> list[Subtree]:
        start, stop = node
        if stop <= low or high <= start:
            return []
        if low <= start and stop <= high:
            return [node]
        middle = splits(shards)[node]
        return walk((start, middle)) + walk((middle, stop))

    return walk((0, shards)) if low < high else []


def add(left: Gradients, right: Gradients) -> Gradients:
    """Add `right` into `left`; a None (no gradient at all) adds nothing, nor does the end of a shorter list."""
    pairs = list(zip_longest(left, right))
    both = [(a, b) for a, b in pairs if a is not None and b is not None]
    if both:
        foreach.add_([a for a, _ in both], [b for _, b in both])
    return [b if a is None else a for a, b in pairs]


class TreeSum:
    """Sums lists of gradients along the tree, in place, as they arrive."""

    def __init__(self, shards: int, adding: Add = add) -> None:
        """`adding` adds two lists, where they hold other than dense gradients."""
        self._splits = splits(shards)
        self._adding = adding
        self.nodes: list[tuple[Subtree, Gradients]] = []
        """What is summed so far: complete subtrees, from left to right."""

    def add(self, node: Subtree, gradients: Gradients) -> None:
        """Take the sum of one node; it must lie right of everything taken before."""
        self.nodes.append((node, gradients))
        while len(self.nodes) > 1:
            (low, middle), left = self.nodes[-2]
            (start, high), right = self.nodes[-1]
            if middle != start or self._splits.get((low, high)) != middle:
                return
            self.nodes[-2:] = [((low, high), self._adding(left, right))]
