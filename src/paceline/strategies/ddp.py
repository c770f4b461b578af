"""One process a device: torch's DistributedDataParallel, with sums where it takes means.

Bucketing, the order of buckets and the overlap with the backward pass are torch's. Two things are ours. The
reducer is armed just before the backward pass that ends a step, so the user's module is called bare, in any
way and any number of times, and earlier passes accumulate without a message. And the communication hook adds:
the division by the weight of the global batch comes later and once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import InputError
from paceline.strategies import gradients
from paceline.strategies.base import Exactness, OpenReplica, Parts, ShardWork
from paceline.strategies.sequential import SequentialReplica
from paceline.strategies.tree import Gradients, fold
from paceline.world import World

if TYPE_CHECKING:
    from torch.distributed import GradBucket  # type: ignore[attr-defined]


class Ddp:
    """Gradients summed over processes in buckets, while the backward pass goes on."""

    name = "ddp"
    exactness = Exactness.NUMERIC
    threaded = False

    def prepare(self, parts: Parts, world: World) -> OpenReplica:
        """Wrap the model; a world of one has nobody to sum with."""
        return DdpReplica(parts, world) if world.size > 1 else SequentialReplica(parts, world)


class _Carried(nn.Module):
    """What DDP sees: the user's module and the ledger that rides along."""

    def __init__(self, model: nn.Module, ledger: nn.Parameter) -> None:
        super().__init__()
        self.model = model
        self.ledger = ledger


class DdpReplica(SequentialReplica):
    """One worker's model, wired to those of the others."""

    def __init__(self, parts: Parts, world: World) -> None:
        super().__init__(parts, world)
        self._allow_unused = parts.allow_unused
        self._ddp = DistributedDataParallel(
            _Carried(self.model, self.ledger),
            process_group=world.comm.group,
            gradient_as_bucket_view=True,
            find_unused_parameters=parts.allow_unused,
        )
        self._ddp.register_comm_hook(self, _sum_bucket)
        self.last_bucket_seen = False
        self._earlier: list[Gradients] = []

    def _arm(self, roots: list[Tensor]) -> None:
        """Let the coming backward pass reduce: what DDP.forward does, without going through it."""
        self._earlier = [summed for _, summed in self._tree.nodes]
        if self._earlier:
            for parameter, gradient in zip(self.tracked, fold(self._earlier), strict=False):
                parameter.grad = gradient
        reducer = self._ddp.reducer
        reducer._rebuild_buckets()  # noqa: SLF001  (DDP.forward calls it just here)
        reducer.prepare_for_forward()
        reducer.prepare_for_backward(roots if self._allow_unused else [])
        self.last_bucket_seen = False

    def _combined(self) -> None:
        """Refuse to go on with gradients that were never reduced."""
        if not self.last_bucket_seen:
            unused = [
                name
                for name, value in self.model.named_parameters()
                if value.requires_grad and value.grad is None
            ]
            raise InputError(
                f"no gradient for {', '.join(unused[:5])} on rank {self.world.rank}: this step's loss does not depend on it. "
                "If that is meant, set allow_unused = True in the task."
            )

    def _close_shard(self, work: ShardWork) -> None:
        """Keep a finished shard's gradients; the last one's have gone out to the others already."""
        if not self._sent:
            super()._close_shard(work)

    def _finish_combination(self) -> None:
        """Take part with zeros when this worker had no sample, or its loop left some out."""
        if not self._sent:
            self._sent = True
            zeros = [torch.zeros_like(parameter) for parameter in self.tracked]
            self._arm(list(self.tracked))
            gradients.run_backward(self.tracked, zeros)
            self._combined()
        if self.auxiliary.names:
            self._combine_auxiliary()

    def _combine_auxiliary(self) -> None:
        behind = len(self.tracked)
        flats = [flat for flat in (*(node[behind:] for node in self._earlier), self.auxiliary.take()) if flat]
        mine = self.auxiliary.dense(fold(flats)) if flats else self.auxiliary.empty()
        lengths = [gradient.numel() for gradient in mine if gradient is not None]
        summed = self.world.comm.all_reduce(
            torch.cat([gradient.reshape(-1) for gradient in mine if gradient is not None])
        )
        parts = zip(summed.split(lengths), mine, strict=True)
        self.auxiliary.give([part.view_as(like) for part, like in parts if like is not None])

    def settle_buffers(self) -> None:
        """Give every worker the first one's buffers."""
        for buffer in self.model.buffers():
            buffer.copy_(self.world.comm.broadcast(buffer))


def _sum_bucket(replica: DdpReplica, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Add a bucket up over all workers, in place. (torch finds the arguments by name: `bucket` must be called so.)"""
    replica.last_bucket_seen = replica.last_bucket_seen or bucket.is_last()
    buffer = bucket.buffer()
    pending = replica.world.comm.all_reduce_(buffer)
    if buffer.is_cuda or not bucket.is_last():
        waiting: torch.futures.Future[Tensor] = pending.future()
        return waiting
    # Nothing is left to overlap with, so waiting here saves a call-back from one of gloo's threads.
    summed: torch.futures.Future[Tensor] = torch.futures.Future()
    summed.set_result(pending.wait())
    return summed


# torch compares the annotations of a hook with types, and ours are text.
_sum_bucket.__annotations__.clear()
