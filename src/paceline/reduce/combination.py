"""Brings a worker's finished shards together with the one whose gradients are just coming out of the backward pass.

Finished shards lie in the tree as sums of complete subtrees. The last shard's gradients come bucket by bucket, and
every subtree that the last shard completes is added into the bucket on its way; the others travel beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.compat import foreach
from paceline.reduce.packing import as_real
from paceline.reduce.tree import Gradients, Subtree, TreeSum, cover, splits


class Combination:
    """What to do with each bucket of one step."""

    def __init__(self, tree: TreeSum, last: int | None, owned: range, shards: int) -> None:
        """`last` is the shard that is live; None when all are finished, or none had a sample."""
        table = splits(shards)
        stack: list[tuple[Subtree, Gradients | None]] = list(tree.nodes)
        self.into_live: list[Gradients] = []
        """Sums that the last shard completes, in the order in which they are added to it."""
        # Shards behind the last one have no samples in this step: they add nothing, but complete their subtrees.
        for leaf in range(owned.stop if last is None else last, owned.stop):
            stack.append(((leaf, leaf + 1), None))
            while len(stack) > 1:
                (low, middle), left = stack[-2]
                (start, high), right = stack[-1]
                if middle != start or table.get((low, high)) != middle:
                    break
                if left is not None and last is not None and low <= last < high:
                    self.into_live.append(left)
                    left = None
                stack[-2:] = [((low, high), left if left is not None else right)]
        if [node for node, _ in stack] != cover(owned.start, owned.stop, shards):
            raise RuntimeError(f"shards {owned} of {shards} do not add up to their subtrees")
        self.nodes = [
            (None, True) if last is not None and low <= last < high else (held, False)
            for (low, high), held in stack
        ]
        """This worker's subtrees from left to right: what is held of each, and whether it is the live one."""

        self.trivial = not self.into_live and self.nodes == [(None, True)]
        """Whether there is nothing but the live shard: one shard a worker."""

    def parts(self, live: Sequence[Tensor], flat: Tensor, places: Sequence[int]) -> list[Tensor]:
        """Return this worker's sums for one bucket, from left to right.

        `flat` is the bucket, `live` its views parameter by parameter (real ones of complex parameters), `places` where each is
        in the held lists.
        """
        for held in self.into_live:
            pairs = [(view, held[place]) for view, place in zip(live, places, strict=True)]
            both = [(view, as_real(old)) for view, old in pairs if old is not None]
            if both:
                foreach.add_([view for view, _ in both], [old for _, old in both])
        return [flat if is_live else _flat(held, live, flat, places) for held, is_live in self.nodes]


def _flat(held: Gradients | None, live: Sequence[Tensor], flat: Tensor, places: Sequence[int]) -> Tensor:
    """Lay a held sum out as the bucket is."""
    # Minus zero is what adds nothing to anything, a minus zero included.
    made = torch.full_like(flat, -0.0)
    if held is not None:
        start = flat.storage_offset()
        for view, place in zip(live, places, strict=True):
            old = held[place]
            if old is not None:
                made.as_strided(view.shape, view.stride(), view.storage_offset() - start).copy_(as_real(old))
    return made
