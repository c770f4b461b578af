"""`LocalComm`: the world of one, so that nobody needs to ask whether there are others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from paceline.errors import InputError
from paceline.world import arguments
from paceline.world.base import Comm, Pending, PendingReduction, ReduceOp
from paceline.world.pending import FinishedReduction


class LocalComm(Comm):
    """Answers every operation alone, with the checks and the copies a real group would make."""

    rank = 0
    size = 1
    group = None

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        """Return a copy."""
        arguments.check_rank("root", root, 1)
        return _copy(tensor)

    def reduce(self, tensor: Tensor, op: ReduceOp = "sum", root: int = 0) -> Tensor | None:
        """Return a copy."""
        arguments.check_rank("root", root, 1)
        return self.all_reduce(tensor, op)

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Return a copy."""
        arguments.check_reduce(op, tensor)
        return _copy(tensor)

    def all_reduce_async(self, tensor: Tensor, op: ReduceOp = "sum") -> PendingReduction:
        """Return a copy."""
        return FinishedReduction(self.all_reduce(tensor, op))

    def all_reduce_(self, tensor: Tensor, op: ReduceOp = "sum") -> PendingReduction:
        """Return the tensor itself, which holds the result already."""
        arguments.check_reduce(op, tensor)
        arguments.check_in_place(tensor)
        return FinishedReduction(tensor)

    def gather(self, tensor: Tensor, root: int = 0) -> list[Tensor] | None:
        """Return a list of one copy."""
        arguments.check_rank("root", root, 1)
        return [_copy(tensor)]

    def scatter(self, tensors: Sequence[Tensor] | None, *, like: Tensor, root: int = 0) -> Tensor:
        """Return a copy of the only tensor."""
        arguments.check_rank("root", root, 1)
        parts = tensors or ()
        arguments.check_parts("scatter", parts, 1)
        arguments.check_same_shape("scatter", parts, like)
        return _copy(parts[0])

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return a list of one copy."""
        return [_copy(tensor)]

    def reduce_scatter(self, tensors: Sequence[Tensor], op: ReduceOp = "sum") -> Tensor:
        """Return a copy of the only tensor."""
        arguments.check_parts("reduce_scatter", tensors, 1)
        return self.all_reduce(tensors[0], op)

    def all_to_all(self, tensors: Sequence[Tensor], *, rows: Sequence[int] | None = None) -> list[Tensor]:
        """Return a list of one copy."""
        arguments.check_parts("all_to_all", tensors, 1)
        arguments.check_rows(tensors, rows, 1)
        return [_copy(tensors[0])]

    def send(self, tensor: Tensor, to: int) -> None:
        """Refuse: there is nobody to send to."""
        del tensor
        _refuse("to", to)

    def recv(self, *, like: Tensor, source: int) -> Tensor:
        """Refuse: there is nobody to receive from."""
        del like
        _refuse("source", source)

    def isend(self, tensor: Tensor, to: int) -> Pending[None]:
        """Refuse: there is nobody to send to."""
        del tensor
        _refuse("to", to)

    def irecv(self, *, like: Tensor, source: int) -> Pending[Tensor]:
        """Refuse: there is nobody to receive from."""
        del like
        _refuse("source", source)

    def barrier(self) -> None:
        """Return: everybody is here."""

    def split(self, color: int | None, key: int | None = None) -> Comm | None:
        """Return another world of one, or None outside of it."""
        del key
        return None if color is None else LocalComm()

    def close(self) -> None:
        """Return: nothing is open."""


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _refuse(what: str, peer: int) -> NoReturn:
    raise InputError(f"a world of one worker has no partner ({what}={peer}). Start at least 2 workers.")
