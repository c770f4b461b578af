"""The exchange without the final gather: each worker ends with its own part of a sum, added in tree order.

Where whole copies of the model stand beside each other (ddp x fsdp), the workers that hold the same part of it in each
copy share the additions of that part, and collect them from each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.compat import process_groups
from paceline.reduce.exchange import Layout
from paceline.world import World, spans


class Scatter:
    """Sums of all workers that data is dealt to, each worker's part to itself."""

    def __init__(self, data: World, copies: World, shards: int) -> None:
        """`data` is everybody, `copies` those who hold the same part of the model."""
        self._data, self._copies = data, copies
        self._layout = Layout.of_workers(data, shards)
        self._parts = data.size // copies.size
        self._pending: tuple[Tensor, Tensor, dist.Work | None] | None = None

    def reserve(self, length: int) -> None:
        """Need nothing beforehand."""

    def room(self, place: int, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:  # noqa: ARG002
        """Return memory for one of this worker's sums, from torch's own allocator."""
        return torch.empty(count, dtype=dtype, device=device)

    def start(self, sums: Sequence[Tensor], target: Tensor) -> None:
        """Send this worker's sums out; each is a whole tensor, cut into equal parts in the order of `fsdp` places.

        `target` gets this worker's part of the total: when the next one starts, or at `finish`.
        """
        self.finish()
        layout, copies = self._layout, self._copies.size
        chunk = -(-target.numel() // copies)
        sent = self._laid_out(sums, target.numel(), chunk)
        received = target.new_empty(sum(layout.counts) * chunk)
        # On a GPU torch's streams overlap already; there a wait is no wait of this process.
        work = dist.all_to_all_single(
            received,
            sent,
            [count * chunk for count in layout.counts],
            [len(sums) * chunk] * layout.size,
            group=self._data.comm.group,
            async_op=target.device.type == "cpu",
        )
        self._pending = (target, received, work)

    def finish(self) -> None:
        """Complete what was started."""
        if self._pending is None:
            return
        (target, received, work), self._pending = self._pending, None
        if work is not None:
            with spans.of[spans.WAITING]:
                work.wait()
        rows = received.view(sum(self._layout.counts), -1)
        for into, source in self._layout.program:
            rows[into] += rows[source]
        total = rows[self._layout.left[0]]
        if self._copies.size > 1:
            whole = total.new_empty(total.numel() * self._copies.size)
            process_groups.all_gather_single(whole, total, group=self._copies.comm.group)
            total = whole[: target.numel()]
        target.copy_(total)

    def add_small(self, sums: Sequence[Tensor]) -> Tensor:
        """Return the whole of a small sum on every worker; `sums` are this worker's, from left to right."""
        layout = self._layout
        mine = torch.full(
            (max(layout.counts), sums[0].numel()), -0.0, dtype=sums[0].dtype, device=sums[0].device
        )
        for place, one in enumerate(sums):
            mine[place] = one
        told = self._data.comm.all_gather(mine)
        rows = torch.cat([part[:count] for part, count in zip(told, layout.counts, strict=True)])
        for into, source in layout.program:
            rows[into] += rows[source]
        return rows[layout.left[0]]

    def _laid_out(self, sums: Sequence[Tensor], length: int, chunk: int) -> Tensor:
        """Put what goes to each worker side by side: worker (copy c, place p) adds the c-th chunk of part p."""
        copies = self._copies.size
        if copies == 1 and len(sums) == 1:
            return sums[0]
        placed = sums[0].new_zeros(copies, self._parts, len(sums), chunk)
        for number, one in enumerate(sums):
            rows = one.view(self._parts, length)
            for copy in range(copies):
                cut = rows[:, copy * chunk : (copy + 1) * chunk]
                placed[copy, :, number, : cut.shape[1]] = cut
        return placed.view(-1)
