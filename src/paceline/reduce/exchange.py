"""How partial sums of all workers become one sum, in the order of the tree: over sockets, or through shared memory.

A worker brings the sums of the subtrees it holds, one flat tensor each. The tensor is cut into one chunk a worker;
each worker adds up its chunk in tree order, and everybody collects all chunks. When each worker holds one subtree,
the bytes are those of a ring all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.compat import process_groups
from paceline.data import owned_shards
from paceline.reduce.tree import Subtree, cover, splits
from paceline.world import Comm, PendingReduction, World, spans

Done = Callable[[], None]


class Exchange(Protocol):
    """Sums over all workers; what is started together is finished together, in order."""

    def start(self, key: int, parts: Sequence[Tensor], target: Tensor, done: Done) -> None:
        """Hand over this worker's sums, from left to right; `target`, one of them as a rule, will hold the total.

        `key` names the tensor: the same one every step.
        """

    def finish(self) -> None:
        """Complete everything started."""


class Layout:
    """Which subtrees each member of a group brings, and in which order they are added.

    A member carries a run of shards: one worker's, or all of one host's.
    """

    def __init__(self, rank: int, owned: Sequence[range], shards: int) -> None:
        self.rank, self.size = rank, len(owned)
        covers = [cover(carried.start, carried.stop, shards) for carried in owned]
        self.counts = [len(nodes) for nodes in covers]
        """How many subtrees each member holds."""
        self.first = [sum(self.counts[:member]) for member in range(self.size)]
        """The place of each member's first one in the list of all."""
        self.program, self.left = program([node for nodes in covers for node in nodes], shards)
        """The additions, and the places that they leave: one when the members carry all shards."""

    @classmethod
    def of_workers(cls, world: World, shards: int) -> Layout:
        """Lay out the exchange of all workers with each other."""
        size, shares = world.size, world.shares
        return cls(world.rank, [owned_shards(rank, size, shards, shares) for rank in range(size)], shards)

    def bounds(self, length: int) -> list[tuple[int, int]]:
        """Return each worker's chunk of a tensor: equal ones, the last ones shorter or empty."""
        chunk = -(-length // self.size)
        return [(min(rank * chunk, length), min((rank + 1) * chunk, length)) for rank in range(self.size)]


def program(nodes: Sequence[Subtree], shards: int) -> tuple[list[tuple[int, int]], list[int]]:
    """Return the additions (into, from) that bring the sums of `nodes` as far up the tree as they reach, and where they end."""
    table = splits(shards)
    stack: list[tuple[Subtree, int]] = []
    steps: list[tuple[int, int]] = []
    for place, node in enumerate(nodes):
        stack.append((node, place))
        while len(stack) > 1:
            (low, middle), into = stack[-2]
            (start, high), source = stack[-1]
            if middle != start or table.get((low, high)) != middle:
                break
            stack[-2:] = [((low, high), into)]
            steps.append((into, source))
    return steps, [place for _, place in stack]


class SocketExchange:
    """Over the process group: one all-to-all of chunks, additions in tree order, one all-gather."""

    def __init__(self, comm: Comm, layout: Layout) -> None:
        self._comm, self._layout = comm, layout
        self._pending: list[tuple[Tensor, Tensor, dist.Work, Done]] = []

    def start(self, key: int, parts: Sequence[Tensor], target: Tensor, done: Done) -> None:  # noqa: ARG002
        """Send each worker its chunk of every part."""
        layout = self._layout
        bounds = layout.bounds(target.numel())
        low, high = bounds[layout.rank]
        sent = parts[0] if len(parts) == 1 else torch.cat([part[a:b] for a, b in bounds for part in parts])
        received = target.new_empty(sum(layout.counts) * (high - low))
        work = dist.all_to_all_single(
            received,
            sent,
            [count * (high - low) for count in layout.counts],
            [len(parts) * (b - a) for a, b in bounds],
            group=self._comm.group,
            async_op=True,
        )
        self._pending.append((target, received, work, done))

    def finish(self) -> None:
        """Add up this worker's chunk of each, and collect everybody's."""
        gathering = []
        for target, received, work, done in self._pending:
            with spans.of[spans.WAITING]:
                work.wait()
            chunk = -(-target.numel() // self._layout.size)
            total = self._add(received)
            whole = target.numel() == chunk * self._layout.size
            result = target if whole else target.new_empty(chunk * self._layout.size)
            if total.numel() < chunk:
                total = torch.cat([total, total.new_zeros(chunk - total.numel())])
            gathered = process_groups.all_gather_single(result, total, group=self._comm.group, async_op=True)
            gathering.append((target, result, gathered, total, done))
        self._pending = []
        for target, result, gathered, _, done in gathering:
            with spans.of[spans.WAITING]:
                gathered.wait()
            if result is not target:
                target.copy_(result[: target.numel()])
            done()

    def _add(self, received: Tensor) -> Tensor:
        rows = received.view(sum(self._layout.counts), -1)
        for into, source in self._layout.program:
            rows[into] += rows[source]
        return rows[0]


class TorchExchange:
    """torch's own all-reduce: the cheapest over sockets, in whatever order it adds.

    For two workers with one subtree each that is the tree, since a + b is b + a to the bit; for more it is numeric.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._pending: list[tuple[PendingReduction, Done]] = []

    def start(self, key: int, parts: Sequence[Tensor], target: Tensor, done: Done) -> None:  # noqa: ARG002
        """Start the reduction of everything this worker has."""
        for part in parts:
            if part is not target:
                target.add_(part)
        self._pending.append((self._comm.all_reduce_(target), done))

    def finish(self) -> None:
        """Wait for all of them."""
        pending, self._pending = self._pending, []
        for reduction, done in pending:
            with spans.of[spans.WAITING]:
                reduction.wait()
            done()


def over_sockets(comm: Comm, layout: Layout) -> Exchange:
    """Return the cheapest exchange over a process group that keeps to the tree."""
    return TorchExchange(comm) if layout.counts == [1, 1] else SocketExchange(comm, layout)
