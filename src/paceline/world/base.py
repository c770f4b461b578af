"""How workers talk: the `Comm` protocol, and `Pending`, an operation in flight.

Every operation returns its value and leaves its input alone; the one exception, `all_reduce_`, says so with
its underscore. A root, a peer and the length of a list are always counted in ranks of the `Comm` they go to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

ReduceOp = Literal["sum", "mean", "min", "max", "product"]
Value_co = TypeVar("Value_co", covariant=True)


class Pending(Protocol[Value_co]):
    """An operation in flight; `wait` may be called more than once."""

    def wait(self) -> Value_co:
        """Return the value as soon as it is there, or raise what went wrong."""

    def done(self) -> bool:
        """Return, without waiting, whether `wait` would return at once."""


class PendingReduction(Pending[Tensor], Protocol):
    """A reduction in flight, which torch's own machinery can wait for too."""

    def future(self) -> Future[Tensor]:
        """Return torch's future of the value, as a DDP communication hook returns it."""


class Comm(Protocol):
    """A group of workers that can exchange tensors."""

    @property
    def rank(self) -> int:
        """This worker's place in the group."""

    @property
    def size(self) -> int:
        """How many workers the group has."""

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group underneath, for torch's own engines; None in a world of one."""

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        """Return the root's tensor on every worker; elsewhere `tensor` only tells shape and type."""

    def reduce(self, tensor: Tensor, op: ReduceOp = "sum", root: int = 0) -> Tensor | None:
        """Combine everybody's tensor at the root; the others get None."""

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Combine everybody's tensor, for everybody."""

    def all_reduce_async(self, tensor: Tensor, op: ReduceOp = "sum") -> PendingReduction:
        """Start an `all_reduce` on a copy and go on working."""

    def all_reduce_(self, tensor: Tensor, op: ReduceOp = "sum") -> PendingReduction:
        """Start an `all_reduce` IN PLACE: for buffers too large to copy; leave it alone until `wait`."""

    def gather(self, tensor: Tensor, root: int = 0) -> list[Tensor] | None:
        """Collect everybody's tensor at the root, in rank order; the others get None."""

    def scatter(self, tensors: Sequence[Tensor] | None, *, like: Tensor, root: int = 0) -> Tensor:
        """Scatter the root's list, one tensor to each rank; `like` has the shape and dtype."""

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Collect everybody's tensor, in rank order, for everybody."""

    def reduce_scatter(self, tensors: Sequence[Tensor], op: ReduceOp = "sum") -> Tensor:
        """Combine the lists item by item and keep the item of this rank."""

    def all_to_all(self, tensors: Sequence[Tensor], *, rows: Sequence[int] | None = None) -> list[Tensor]:
        """Send item i to rank i and give what the others sent here, in rank order.

        Items may differ in their first dimension. Whoever knows how many rows will come from each rank passes
        `rows` on every rank, which saves the message that asks for them.
        """

    def send(self, tensor: Tensor, to: int) -> None:
        """Send to one rank; returns when the tensor may be changed again."""

    def recv(self, *, like: Tensor, source: int) -> Tensor:
        """Receive from one rank; `like` tells shape and type."""

    def isend(self, tensor: Tensor, to: int) -> Pending[None]:
        """Start a `send`; leave `tensor` alone until `wait`."""

    def irecv(self, *, like: Tensor, source: int) -> Pending[Tensor]:
        """Start a `recv`."""

    def barrier(self) -> None:
        """Return only when everybody has come here."""

    def split(self, color: int | None, key: int | None = None) -> Comm | None:
        """Form groups of those with the same colour; None stays outside and gets None.

        Ranks in a group follow `key`, then the rank here. Everybody must call it.
        """

    def close(self) -> None:
        """Leave the group; a second call does nothing."""
