"""The batches that a captured step reads: tensors that stay where they are, and are written to before each replay."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from paceline.compat import foreach
from paceline.data.resident import Rows
from paceline.strategies.base import StepWork

Form = tuple[Hashable, ...]
"""What batches are like: shapes, layouts and types of their tensors, and everything else by its value."""


class UnfitBatchError(Exception):
    """A batch holds something that a captured step could not be given."""


def form_of(work: StepWork) -> tuple[Form, list[Tensor]]:
    """Return what the batches of a step are like, and their tensors in order; raise where a graph cannot be fed with them."""
    tensors: list[Tensor] = []
    forms = tuple((shard.index, *(_form(batch, tensors) for batch in shard.batches)) for shard in work.shards)
    return (work.size, *forms), tensors


def _form(part: Any, tensors: list[Tensor]) -> Hashable:
    if type(part) is Tensor:
        tensors.append(part)
        return part.shape, part.stride(), part.dtype, part.device
    if type(part) in (list, tuple):
        return type(part), *(_form(one, tensors) for one in part)
    if type(part) is dict:
        return dict, *((key, _form(one, tensors)) for key, one in part.items())
    if type(part) in (int, float, bool, str, bytes, type(None)):
        return type(part), part
    if type(part) is Rows:
        tensors.append(part.rows)
        return Rows, part.rows.shape, *map(id, part.copies)
    raise UnfitBatchError(f"a batch holds a {type(part).__name__}")


class StaticInputs:
    """The batches of one step, in memory of their own."""

    def __init__(self, work: StepWork, device: torch.device) -> None:
        self._held: list[Tensor] = []
        self.work = replace(
            work,
            shards=[
                replace(shard, batches=[self._kept(batch, device) for batch in shard.batches])
                for shard in work.shards
            ],
        )
        """The same step over these batches."""

    def _kept(self, part: Any, device: torch.device) -> Any:
        if type(part) is Tensor:
            self._held.append(part.to(device, copy=True))
            return self._held[-1]
        if type(part) is Rows:
            return Rows(part.copies, self._kept(part.rows, device))
        if type(part) in (list, tuple):
            return type(part)(self._kept(one, device) for one in part)
        if type(part) is dict:
            return {key: self._kept(one, device) for key, one in part.items()}
        return part

    def fill(self, tensors: Sequence[Tensor]) -> None:
        """Take over the batches of another step of the same form."""
        if len(self._held) == 1:
            self._held[0].copy_(tensors[0], non_blocking=True)
        elif self._held:
            foreach.copy_(self._held, list(tensors), non_blocking=True)
