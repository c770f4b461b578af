"""Memory that MPI reads and writes: a tensor's own where it can be, else a copy that is brought back.

What only moves is moved as bytes, so every dtype travels as it is. A tensor on a GPU is given to MPI itself where the library
takes such memory, and goes through pinned memory of the host where it does not.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.errors import InputError
from paceline.world.mpi import library


@functools.lru_cache(maxsize=1)
def _takes_cuda() -> bool:
    """Return whether MPI takes the memory of a GPU; rank 0 says so once."""
    takes = library.takes_cuda()
    if library.load().COMM_WORLD.Get_rank() == 0:
        how = (
            "to MPI as they are"
            if takes
            else "through pinned host memory, because this MPI library takes no other"
        )
        print(f"note: CUDA tensors go {how}.", file=sys.stderr)  # noqa: T201
    return takes


class Memory:
    """What MPI reads or writes in place of one tensor."""

    def __init__(self, tensor: Tensor, *, read: bool = True) -> None:
        """Take a tensor's memory, or make some; `read` says whether what the tensor holds is needed there."""
        if tensor.layout is not torch.strided:
            raise InputError(f"MPI carries dense tensors, and this one is {tensor.layout}. Use to_dense().")
        self._tensor = tensor.detach()
        # What the caller's stream has yet to write here must not come after what MPI brings, which another stream writes.
        settle(self._tensor)
        self.held = self._reachable(read=read)
        """The contiguous tensor that stands in for it."""

    def _reachable(self, *, read: bool) -> Tensor:
        tensor = self._tensor
        if tensor.is_cuda and not _takes_cuda():
            held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            return held.copy_(tensor) if read else held
        if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            return tensor
        if read:
            return tensor.resolve_conj().resolve_neg().contiguous()
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)

    def bring_back(self) -> None:
        """Write into the tensor what MPI has written beside it."""
        if self.held is not self._tensor:
            self._tensor.copy_(self.held)
        settle(self._tensor)


def settle(tensor: Tensor) -> None:
    """Wait for what a GPU has yet to do to a tensor: MPI knows nothing of streams, nor do other streams of this thread's."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


def raw(mpi: Any, tensor: Tensor) -> list[Any]:
    """Return a contiguous tensor's memory as MPI takes bytes; without a count, which mpi4py would take as each rank's."""
    return [_memory(mpi, tensor), mpi.BYTE]


def raw_parts(mpi: Any, tensor: Tensor, counts: Sequence[int]) -> list[Any]:
    """Return a contiguous tensor's memory as MPI takes parts of so many bytes, one after the other."""
    starts = [0, *itertools.accumulate(counts)][: len(counts)]
    return [_memory(mpi, tensor), (list(counts), starts), mpi.BYTE]


def typed(mpi: Any, tensor: Tensor, kind: Any) -> list[Any]:
    """Return a contiguous tensor's memory as MPI takes values of one of its types."""
    return [_memory(mpi, tensor), kind]


def _memory(mpi: Any, tensor: Tensor) -> Any:
    settle(tensor)
    return mpi.buffer.fromaddress(tensor.data_ptr(), size_of(tensor))


def size_of(tensor: Tensor) -> int:
    """Return how many bytes a tensor's values take."""
    return tensor.numel() * tensor.element_size()


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return the bytes of several tensors, one after the other."""
    return torch.cat([Memory(one).held.reshape(-1).view(torch.uint8) for one in tensors])


def separated(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Write bytes that stand one after the other into several tensors."""
    parts = torch.split(flat, [size_of(one) for one in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        # A copy begins at an address that fits every dtype.
        tensor.detach().copy_(part.clone().view(tensor.dtype).view(tensor.shape))
        settle(tensor)


def overlaps(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are parts of one memory."""
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
