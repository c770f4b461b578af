"""`ProcessGroupComm`: the operations over a process group of torch's (gloo, nccl, or both by device).

What only moves data moves bytes, so every type travels, also those a backend cannot compute with. A mean is a
sum that is divided afterwards, on every backend.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from paceline.compat import process_groups
from paceline.errors import InputError, PacelineError
from paceline.transport.store import RunStore
from paceline.world import arguments
from paceline.world.base import Comm, Pending, PendingReduction, ReduceOp
from paceline.world.interruption import Interruption
from paceline.world.pending import Delivery, WorkingReduction
from paceline.world.sockets import Sockets

_TORCH_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}


class Patience(NamedTuple):
    """How long things may take in a group."""

    timeout: timedelta
    """An operation."""
    meeting: timedelta
    """Connecting with the others, when a group is formed."""


def reading_together(store: Store | None, size: int) -> contextlib.AbstractContextManager[None]:
    """Have a run's store read the addresses of all ranks at once, while gloo forms a group of so many."""
    return store.gathering(size) if isinstance(store, RunStore) else contextlib.nullcontext()


class ProcessGroupComm(Comm):
    """A group of workers, each in a process of its own."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        patience: Patience,
        interruption: Interruption | None = None,
        store: Store | None = None,
    ) -> None:
        self._group: dist.ProcessGroup | None = group
        # Held, because torch keeps only the C++ half of a store that is written in Python, and `split` meets there.
        self._store = store
        self._interruption = interruption or Interruption()
        self._patience = patience
        if patience.meeting != patience.timeout:
            process_groups.set_timeout(group, patience.timeout)
        self._rank = dist.get_rank(group)
        self._size = dist.get_world_size(group)
        # Gloo reduces and gathers CUDA tensors, but cannot send one to a single rank.
        self._sends_cuda = "nccl" in str(dist.get_backend_config(group))
        if self._sends_cuda:
            self._interruption.on_raise(lambda: process_groups.abort(group))

    @property
    def rank(self) -> int:
        """This worker's place in the group."""
        return self._rank

    @property
    def size(self) -> int:
        """How many workers the group has."""
        return self._size

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of torch's."""
        if self._group is None:
            raise PacelineError(
                "this group is closed, so nothing can be sent through it. Use it before close()."
            )
        return self._group

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        """Return the root's tensor on every worker."""
        arguments.check_rank("root", root, self._size)
        value = _copy(tensor) if self._rank == root else _empty(tensor)
        dist.broadcast(_bytes(value), group_src=root, group=self.group)
        return value

    def reduce(self, tensor: Tensor, op: ReduceOp = "sum", root: int = 0) -> Tensor | None:
        """Combine everybody's tensor at the root."""
        arguments.check_rank("root", root, self._size)
        arguments.check_reduce(op, tensor)
        value = _copy(tensor)
        dist.reduce(value, op=_TORCH_OPS[op], group_dst=root, group=self.group)
        if self._rank != root:
            return None
        return value.div_(self._size) if op == "mean" else value

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Combine everybody's tensor, for everybody."""
        arguments.check_reduce(op, tensor)
        value = _copy(tensor)
        dist.all_reduce(value, op=_TORCH_OPS[op], group=self.group)
        return value.div_(self._size) if op == "mean" else value

    def all_reduce_async(self, tensor: Tensor, op: ReduceOp = "sum") -> PendingReduction:
        """Start an `all_reduce` on a copy."""
        return self.all_reduce_(_copy(tensor), op)

    def all_reduce_(self, tensor: Tensor, op: ReduceOp = "sum") -> PendingReduction:
        """Start an `all_reduce` in place."""
        arguments.check_reduce(op, tensor)
        arguments.check_in_place(tensor)
        value = tensor.detach()
        # Past torch.distributed's own function: its checks and logging cost more than a small reduction itself.
        options = dist.AllreduceOptions()
        options.reduceOp = _TORCH_OPS[op]  # type: ignore[assignment]
        work = self.group.allreduce([value], options)
        return WorkingReduction(work, value, self._size if op == "mean" else None)

    def gather(self, tensor: Tensor, root: int = 0) -> list[Tensor] | None:
        """Collect everybody's tensor at the root."""
        arguments.check_rank("root", root, self._size)
        values = [_empty(tensor) for _ in range(self._size)] if self._rank == root else None
        places = None if values is None else [_bytes(value) for value in values]
        dist.gather(_bytes(_contiguous(tensor)), places, group_dst=root, group=self.group)
        return values

    def scatter(self, tensors: Sequence[Tensor] | None, *, like: Tensor, root: int = 0) -> Tensor:
        """Scatter the root's list, one tensor to each rank."""
        arguments.check_rank("root", root, self._size)
        parts: list[Tensor] | None = None
        if self._rank == root:
            given = tensors or ()
            arguments.check_parts("scatter", given, self._size)
            arguments.check_same_shape("scatter", given, like)
            parts = [_bytes(_contiguous(tensor)) for tensor in given]
        value = _empty(like)
        dist.scatter(_bytes(value), parts, group_src=root, group=self.group)
        return value

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Collect everybody's tensor, for everybody."""
        values = tensor.new_empty((self._size, *tensor.shape))
        process_groups.all_gather_single(_bytes(values), _bytes(_contiguous(tensor)), group=self.group)
        return list(values.unbind(0))

    def reduce_scatter(self, tensors: Sequence[Tensor], op: ReduceOp = "sum") -> Tensor:
        """Combine the lists item by item and keep this rank's."""
        arguments.check_parts("reduce_scatter", tensors, self._size)
        arguments.check_same_shape("reduce_scatter", tensors, tensors[0])
        arguments.check_reduce(op, tensors[0])
        value = _empty(tensors[0])
        flat = torch.cat([_plain(tensor).reshape(-1) for tensor in tensors])
        process_groups.reduce_scatter_single(value.view(-1), flat, op=_TORCH_OPS[op], group=self.group)
        return value.div_(self._size) if op == "mean" else value

    def all_to_all(self, tensors: Sequence[Tensor], *, rows: Sequence[int] | None = None) -> list[Tensor]:
        """Send item i to rank i and give what came from each rank."""
        arguments.check_parts("all_to_all", tensors, self._size)
        arguments.check_rows(tensors, rows, self._size)
        leaving = [tensor.shape[0] for tensor in tensors]
        coming = self._ask_for_rows(leaving) if rows is None else list(rows)
        tail = tensors[0].shape[1:]
        row_bytes = tail.numel() * tensors[0].element_size()
        values = tensors[0].new_empty((sum(coming), *tail))
        dist.all_to_all_single(
            _bytes(values),
            _bytes(torch.cat([_plain(tensor) for tensor in tensors])),
            [count * row_bytes for count in coming],
            [count * row_bytes for count in leaving],
            group=self.group,
        )
        return list(torch.split(values, coming))

    def send(self, tensor: Tensor, to: int) -> None:
        """Send to one rank."""
        self.isend(tensor, to).wait()

    def recv(self, *, like: Tensor, source: int) -> Tensor:
        """Receive from one rank."""
        return self.irecv(like=like, source=source).wait()

    def isend(self, tensor: Tensor, to: int) -> Pending[None]:
        """Start a `send`."""
        arguments.check_peer("to", to, self._rank, self._size)
        buffer = _contiguous(tensor)
        if buffer.is_cuda and not self._sends_cuda:
            buffer = buffer.cpu()
        work = dist.isend(_bytes(buffer), group_dst=to, group=self.group)
        return Delivery(_started(work), buffer, lambda: None, self._patience.timeout)

    def irecv(self, *, like: Tensor, source: int) -> Pending[Tensor]:
        """Start a `recv`."""
        arguments.check_peer("source", source, self._rank, self._size)
        staged = like.is_cuda and not self._sends_cuda
        buffer = torch.empty(like.shape, dtype=like.dtype, device="cpu" if staged else like.device)
        work = dist.irecv(_bytes(buffer), group_src=source, group=self.group)
        return Delivery(_started(work), buffer, lambda: buffer.to(like.device), self._patience.timeout)

    def barrier(self) -> None:
        """Return only when everybody has come here; host memory, so that no GPU is involved."""
        dist.all_reduce(torch.zeros(1), group=self.group)

    def split(self, color: int | None, key: int | None = None) -> Comm | None:
        """Form groups of those with the same colour, ordered by key."""
        if color is not None and not 0 <= color < 2**62:
            raise InputError(
                f"the colour of a split is {color}. Use a whole number from 0, or None to stay outside."
            )
        mine = (-1 if color is None else color, self._rank if key is None else key, secrets.randbits(62))
        seats = [seat.tolist() for seat in self.all_gather(torch.tensor(mine, dtype=torch.int64))]
        if color is None:
            return None
        members = sorted((seat[1], rank) for rank, seat in enumerate(seats) if seat[0] == color)
        global_ranks = dist.get_process_group_ranks(self.group)
        # Rank 0's random number makes the name of this split unlike any other's in the life of the store.
        name = f"split-{seats[0][2]:x}-{color}"
        sockets = Sockets()
        together = reading_together(None if self._sends_cuda else self._store, len(members))
        with together, sockets.opened_here():
            group = process_groups.new_group(
                name, [global_ranks[rank] for _, rank in members], self._patience.meeting
            )
        self._interruption.on_raise(sockets.shut)
        return ProcessGroupComm(
            group, patience=self._patience, interruption=self._interruption, store=self._store
        )

    def close(self) -> None:
        """Destroy the group; closing the whole world's group ends those split from it too."""
        group, self._group = self._group, None
        if group is not None and process_groups.is_formed(group):
            dist.destroy_process_group(group)

    def _ask_for_rows(self, leaving: list[int]) -> list[int]:
        coming = torch.empty(self._size, dtype=torch.int64)
        dist.all_to_all_single(coming, torch.tensor(leaving, dtype=torch.int64), group=self.group)
        counts: list[int] = coming.tolist()
        return counts


def _copy(tensor: Tensor) -> Tensor:
    return _plain(tensor).clone(memory_format=torch.contiguous_format)


def _contiguous(tensor: Tensor) -> Tensor:
    return _plain(tensor).contiguous()


def _plain(tensor: Tensor) -> Tensor:
    """Return a tensor whose memory holds its values, where it is a view that conjugates or negates."""
    return tensor.detach().resolve_conj().resolve_neg()


def _empty(like: Tensor) -> Tensor:
    return torch.empty_like(like, memory_format=torch.contiguous_format, requires_grad=False)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _started(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise PacelineError(
            "torch started no message, because this process is not in the group. Split again."
        )
    return work
