"""Embeddings whose rows are elsewhere: each forward pass fetches those that its batch names.

The module stays where it is, with its weight as a stand-in of the full shape that holds no memory. The gradient that the
backward pass leaves there is the very one that the whole table would get: the ids of the batch and a row for each.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.compat.tensors import sparse_parts
from paceline.errors import InputError
from paceline.strategies import sparse
from paceline.strategies.memory.offload import without_memory
from paceline.strategies.sparse import weight_of

Fetch = Callable[[Tensor], Tensor]
"""Returns rows by their numbers, which are sorted and unique."""


class _Fetched(torch.autograd.Function):
    """Rows that came from elsewhere, as if they had been taken from the weight."""

    @staticmethod
    def forward(context: Any, weight: Tensor, numbers: Tensor, values: Tensor) -> Tensor:
        context.save_for_backward(numbers)
        context.shape = weight.shape
        return values.view_as(values)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (numbers,) = context.saved_tensors
        # Not coalesced: what is added first is for the whole table and for a part of it the same.
        indices, values = sparse_parts(gradient)
        ids = numbers[indices[0]]
        made = torch.sparse_coo_tensor(
            ids.unsqueeze(0),
            values,
            context.shape,
            check_invariants=False,
        )
        return made, None, None


class FarEmbedding(nn.Embedding):
    """An `nn.Embedding` whose rows are on servers."""

    fetch: Fetch
    memory: int
    name: str

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (as torch calls it)
        """Return the rows of some ids."""
        rows, places, padding = _rows(self, input)
        return F.embedding(places, rows, padding, sparse=True)


class FarEmbeddingBag(nn.EmbeddingBag):
    """An `nn.EmbeddingBag` whose rows are on servers."""

    fetch: Fetch
    memory: int
    name: str

    def forward(
        self,
        input: Tensor,  # noqa: A002
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Return the sum or the mean of the rows of each bag of ids."""
        rows, places, padding = _rows(self, input)
        return F.embedding_bag(
            places,
            rows,
            None if offsets is None else offsets.to(places.dtype),
            mode=self.mode,
            sparse=True,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=padding,
        )


_ONE_NUMBER = "refers to a single memory location"
"""Of what torch says when it will not write to such a tensor."""
_NEAR: dict[type, type] = {FarEmbedding: nn.Embedding, FarEmbeddingBag: nn.EmbeddingBag}
_FAR = {near: far for far, near in _NEAR.items()}


def _rows(table: FarEmbedding | FarEmbeddingBag, ids: Tensor) -> tuple[Tensor, Tensor, int | None]:
    """Fetch the rows that a batch names; gives them, the place of each id among them, and the place of the padding."""
    check_own(table)
    padding = table.padding_idx
    if padding is None:
        numbers, places = torch.unique(ids, return_inverse=True)
    else:
        # Padding counts as fetched in every batch: torch lays gradients out otherwise where a table has none, and adds them
        # in another order.
        numbers, found = torch.unique(
            torch.cat([ids.flatten(), ids.new_tensor([padding])]), return_inverse=True
        )
        places, padding = found[:-1].view_as(ids), int(found[-1])
    if len(numbers) and not 0 <= int(numbers[0]) <= int(numbers[-1]) < table.num_embeddings:
        raise IndexError(
            f"index out of range in self: ids from {int(numbers[0])} to {int(numbers[-1])} for {table.num_embeddings} rows"
        )
    rows = _Fetched.apply(table.weight, numbers, table.fetch(numbers))  # type: ignore[no-untyped-call]
    return rows, places, padding


def check_own(table: FarEmbedding | FarEmbeddingBag) -> None:
    """Raise where another tensor was put in the place of the stand-in: the servers' rows would be used all the same."""
    if table.weight.data_ptr() != table.memory:
        raise InputError(
            f"the weight of an embedding of shape {tuple(table.weight.shape)} was given another tensor "
            "(torch.func.functional_call, an assignment to it or to its .data), and under hybrid its rows are on servers. "
            "Use --strategy ddp."
        )
    _check_settings(table.name, table)


def _check_settings(name: str, table: nn.Embedding | nn.EmbeddingBag) -> None:
    """Raise for what a table does with rows that no batch names."""
    if table.max_norm is not None or table.scale_grad_by_freq:
        raise InputError(
            f"{name} has max_norm or scale_grad_by_freq, which need the whole table at hand. Leave them out, or use "
            "--strategy ddp."
        )
    if not table.sparse:
        raise InputError(
            f"{name} no longer has sparse=True, and under hybrid its rows are on servers. Leave it as it is, or use "
            "--strategy ddp."
        )


def check_unwritten(table: nn.Embedding | nn.EmbeddingBag) -> None:
    """Raise where something was written to the stand-in: the servers' rows would be used all the same."""
    if isinstance(table, FarEmbedding | FarEmbeddingBag) and not table.weight.detach()[:1, :1].isnan().all():
        raise InputError(
            f"{weight_of(table.name)} was written to, and under hybrid its rows are on servers, which would go on without that. "
            "Write to it before run.prepare, or use --strategy ddp."
        )


def explained(error: BaseException) -> InputError | None:
    """Return the words for torch's refusal to write to a stand-in, of which all numbers are one; None for any other error."""
    if not isinstance(error, RuntimeError) or _ONE_NUMBER not in str(error):
        return None
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return InputError(
        f"line {frame.lineno} of {Path(frame.filename).name} writes to a tensor of which all numbers are one in memory. Under "
        "hybrid the weight of a table is one, whose rows are on servers, and on a server all weights are. Write to weights "
        "before run.prepare, or use --strategy ddp; clone() a tensor of your own first."
    )


def check(model: nn.Module) -> None:
    """Refuse a model whose tables cannot go to servers, or that has none."""
    found = sparse.tables(model)
    if not found:
        raise InputError(
            "--strategy hybrid keeps embeddings with sparse=True on servers, and the model has none. "
            "Use --strategy ddp, or nn.Embedding(..., sparse=True)."
        )
    holders: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        holders.setdefault(id(parameter), []).append(name)
    for name, table in found.items():
        if type(table) not in (*_NEAR, *_FAR):
            raise InputError(
                f"{name} is a {type(table).__name__}, and --strategy hybrid cannot know what its forward does with the rows. "
                "Use nn.Embedding or nn.EmbeddingBag itself, or --strategy ddp."
            )
        _check_settings(name, table)
        if len(holders[id(table.weight)]) > 1:
            raise InputError(
                f"{' and '.join(holders[id(table.weight)])} are one table; --strategy hybrid needs one module for each. "
                "Use --strategy ddp."
            )


def send_away(name: str, table: nn.Embedding | nn.EmbeddingBag, fetch: Fetch, device: torch.device) -> None:
    """Replace a table by one whose rows are fetched from servers."""
    table.__class__ = _FAR.get(type(table), type(table))
    table.fetch = fetch  # type: ignore[assignment]
    table.name = name  # type: ignore[assignment]
    stand_in = without_memory(table.weight.shape, table.weight.dtype, device)
    # Which is all of it: what is read here is no number, rather than a wrong one.
    stand_in[:1, :1] = float("nan")
    table.weight.data = stand_in
    table.memory = stand_in.data_ptr()  # type: ignore[assignment]


def bring_back(model: nn.Module) -> None:
    """Make ordinary tables of them again, without their values: those are loaded next."""
    for table in sparse.tables(model).values():
        if type(table) in _NEAR:
            table.__class__ = _NEAR[type(table)]
            del table.fetch, table.memory, table.name
            table.weight.data = torch.zeros_like(table.weight, memory_format=torch.contiguous_format)
