"""Sums gradients over the workers after the backward pass, for strategies in which torch's reducer cannot ride along.

A worker brings the sums of the subtrees that its shards make up (`TreeSum`), as plain tensors; missing ones are None.
They are laid out in buckets of a few megabytes, and each bucket is one exchange in the order of the tree: the bits are
those of one process that adds up the same gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.data import owned_shards
from paceline.errors import InputError
from paceline.reduce.combination import Combination
from paceline.reduce.exchange import Exchange, Layout, over_sockets
from paceline.reduce.hosts import open_shared_memory
from paceline.reduce.packing import refuse_rows
from paceline.reduce.tree import Gradients, TreeSum
from paceline.world import World
from paceline.world.fault_points import REDUCTION, hit
from paceline.world.status_page import Phase

BUCKET = 4 << 20
"""Bytes of a bucket: it stays in the last-level cache between copying in, adding and copying out."""


def open_exchange(world: World, shards: int, transport: str = "auto") -> Exchange:
    """Choose how sums travel in the order of the tree; all workers choose alike."""
    made = open_shared_memory(world, shards) if transport != "gloo" else None
    if made is not None:
        return made
    if transport == "shm":
        raise InputError(
            "--transport shm needs CPU workers on Linux hosts (x86-64 or aarch64), as many on each. Use --transport gloo."
        )
    world.note_transport()
    return over_sockets(world.comm, Layout.of_workers(world, shards))


@dataclass(frozen=True)
class _Bucket:
    """Some gradients that travel as one flat tensor, which is the same memory every step."""

    flat: Tensor
    views: list[Tensor]
    places: list[int]
    """Where each is in the list of all."""

    def fill(self, held: Gradients) -> Tensor:
        """Lay a list out in the flat tensor."""
        for view, place in zip(self.views, self.places, strict=True):
            gradient = held[place]
            if gradient is None:
                view.fill_(-0.0)  # minus zero is what adds nothing to anything, a minus zero included
            else:
                view.copy_(gradient)
        return self.flat


class PostBackwardReduce:
    """The sum over all workers of lists of gradients that are finished.

    `world` holds those that data is dealt out to: `world.submesh("ddp", "fsdp")` where there are others.
    """

    def __init__(self, world: World, shards: int, transport: str = "auto", *, strategy: str = "pp") -> None:
        self._world, self._shards, self._strategy = world, shards, strategy
        self._exchange = open_exchange(world, shards, transport) if world.size > 1 else None
        self._owned = owned_shards(world.rank, world.size, shards, world.shares)
        self._buckets: list[_Bucket] = []
        self._known: list[tuple[torch.Size, torch.dtype]] = []

    def sum(self, tree: TreeSum, like: Sequence[Tensor]) -> Gradients:
        """Return the total of each gradient, None where no worker has one; `like` tells shapes and types, the same on all.

        What is given may be memory that the next call writes to.
        """
        nodes = [held for held, _ in Combination(tree, None, self._owned, self._shards).nodes]
        if self._exchange is None:
            return _filled_up(nodes[0], len(like))
        for held in nodes:
            refuse_rows(held or (), self._strategy)
        # Which gradients there are travels beside them: as many numbers, each a count of the workers that have it.
        lists = [_filled_up(held, len(like)) for held in nodes]
        found = [float(any(one is not None for one in each)) for each in zip(*lists, strict=True)]
        present = torch.tensor(found).to(like[0].device, non_blocking=True)
        summed, counts = self._travel(self._exchange, lists, like, present)
        if all(found):
            return summed  # what is here is somewhere, so no GPU is waited for to say so
        return [one if count else None for one, count in zip(summed, counts.tolist(), strict=True)]

    def _travel(
        self, exchange: Exchange, lists: list[Gradients], like: Sequence[Tensor], present: Tensor
    ) -> tuple[Gradients, Tensor]:
        """Return the sums of all places, and how many workers have something at each."""
        self._lay_out(like, present)
        first, *others = lists
        for key, bucket in enumerate(self._buckets):
            behind = [bucket.fill([*held, None]).clone() for held in others]
            exchange.start(key, [bucket.fill([*first, present]), *behind], bucket.flat, lambda: None)
        hit(REDUCTION)
        before = self._world.status_page.enter(Phase.COMMUNICATION)
        exchange.finish()
        self._world.status_page.enter(before)
        summed: Gradients = [None] * (len(like) + 1)
        for bucket in self._buckets:
            for view, place in zip(bucket.views, bucket.places, strict=True):
                summed[place] = view
        counts = summed.pop()
        if counts is None:
            raise RuntimeError("the counts did not travel")
        return summed, counts

    def _lay_out(self, like: Sequence[Tensor], present: Tensor) -> None:
        """Cut the list into buckets, by type and size, once for each list of shapes."""
        known = [(one.shape, one.dtype) for one in like]
        if known == self._known:
            return
        self._known, self._buckets = known, []
        room: dict[torch.dtype, list[tuple[int, Tensor]]] = {}
        for place, one in enumerate([*like, present]):
            waiting = room.setdefault(one.dtype, [])
            waiting.append((place, one))
            if sum(each.numel() * each.element_size() for _, each in waiting) >= BUCKET:
                self._buckets.append(_bucket(room.pop(one.dtype)))
        self._buckets += [_bucket(waiting) for waiting in room.values()]


def _bucket(members: list[tuple[int, Tensor]]) -> _Bucket:
    first = members[0][1]
    flat = torch.empty(sum(one.numel() for _, one in members), dtype=first.dtype, device=first.device)
    parts = torch.split(flat, [one.numel() for _, one in members])
    views = [part.view(one.shape) for part, (_, one) in zip(parts, members, strict=True)]
    return _Bucket(flat, views, [place for place, _ in members])


def _filled_up(held: Gradients | None, length: int) -> Gradients:
    held = held or []
    return [*held, *[None] * (length - len(held))]
