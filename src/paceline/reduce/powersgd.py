"""The arithmetic of PowerSGD: a sum of matrices over all workers as the product of two thin ones.

With Q from the step before, P is the sum of M Q, made orthogonal; the new Q is the sum of M' P; the sum of the M is about
P Q'. What that misses of this worker's M is kept and added to its next one, so nothing is lost for good.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.world import Comm, PendingReduction, seeds


@dataclass
class Matrix:
    """One matrix on its way through a step."""

    place: int
    values: Tensor
    """This worker's part, and at the end the sum over all."""
    left: Tensor
    right: Tensor
    in_progress: list[PendingReduction]
    """The reduction that this matrix and its neighbours wait for."""


class LowRank:
    """The thin matrices and remainders of all parameters, from step to step."""

    def __init__(self, comm: Comm, rank: int) -> None:
        self._comm, self._rank = comm, rank
        self._right: dict[int, Tensor] = {}
        self._remainder: dict[int, Tensor] = {}
        self.sent = 0
        """Bytes that left this worker, as a ring sends them."""

    def shrinks(self, shape: Sequence[int]) -> bool:
        """Return whether the thin matrices are less than half of the whole."""
        if len(shape) < 2:
            return False
        rows, columns = shape[0], torch.Size(shape[1:]).numel()
        return 2 * self._rank * (rows + columns) < rows * columns

    def start(self, values: Mapping[int, Tensor]) -> list[Matrix]:
        """Begin with the matrices of a bucket, by the number of their parameter."""
        matrices = []
        for place, value in values.items():
            if place in self._remainder:
                value.add_(self._remainder[place])
            right = self._right_of(place, value)
            matrices.append(Matrix(place, value, value @ right, right, []))
        self._reduce(matrices, "left")
        return matrices

    def second(self, matrices: list[Matrix]) -> list[Matrix]:
        """Have the left ones, and begin with the right ones."""
        self._wait(matrices)
        for matrix in matrices:
            matrix.left = torch.linalg.qr(matrix.left).Q
            matrix.right = matrix.values.T @ matrix.left
        self._reduce(matrices, "right")
        return matrices

    def finish(self, matrices: list[Matrix]) -> None:
        """Put the sums in the place of this worker's parts, and keep what they miss of those."""
        self._wait(matrices)
        for matrix in matrices:
            total = matrix.left @ matrix.right.T
            # All workers' remainders together are what the sum misses.
            self._remainder[matrix.place] = matrix.values.sub(total, alpha=1.0 / self._comm.size)
            self._right[matrix.place] = matrix.right.clone()
            matrix.values.copy_(total)

    def _right_of(self, place: int, value: Tensor) -> Tensor:
        if place not in self._right:
            drawn = torch.Generator().manual_seed(seeds.derive(0, "powersgd", place))
            made = torch.randn(value.shape[1], self._rank, generator=drawn, dtype=value.dtype)
            self._right[place] = made.to(value.device)
        return self._right[place]

    def _reduce(self, matrices: list[Matrix], side: str) -> None:
        """Sum one side of all matrices as one message; they become views of it."""
        if not matrices:
            return
        parts: list[Tensor] = [getattr(matrix, side) for matrix in matrices]
        flat = torch.cat([part.reshape(-1) for part in parts])
        in_progress = [self._comm.all_reduce_(flat)]
        ring = 2 * (self._comm.size - 1) / self._comm.size
        self.sent += round(ring * flat.numel() * flat.element_size())
        for matrix, part, piece in zip(
            matrices, parts, torch.split(flat, [part.numel() for part in parts]), strict=True
        ):
            setattr(matrix, side, piece.view_as(part))
            matrix.in_progress = in_progress

    def _wait(self, matrices: list[Matrix]) -> None:
        for pending in matrices[0].in_progress if matrices else []:
            pending.wait()
