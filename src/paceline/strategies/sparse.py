"""Gradients that are a few rows of a large table: those of `nn.Embedding` and `nn.EmbeddingBag` with sparse=True.

A shard's gradient is coalesced, so that each row is there once, in the order of the rows. Two are added row by row: what is
in both is left + right, what is in one is taken as it is. So the sum of a row does not depend on which other rows
travel with it, and a table that is sharded by rows gets the bits of a whole one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import cast

import torch
from torch import Tensor, nn

from paceline.errors import InputError
from paceline.reduce import tree
from paceline.reduce.tree import Gradients, Subtree
from paceline.world import World, all_gather_object

TABLES = (nn.Embedding, nn.EmbeddingBag)


def tables(model: nn.Module) -> dict[str, nn.Embedding | nn.EmbeddingBag]:
    """Return the modules of a model whose gradients are rows, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, TABLES) and module.sparse and module.weight.requires_grad
    }


def weight_of(table: str) -> str:
    """Return the name of a table's weight; a model may be a table itself."""
    return f"{table}.weight" if table else "weight"


def sparse_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a model whose gradients are rows, each once."""
    weights = (cast("nn.Parameter", table.weight) for table in tables(model).values())
    found = list({id(weight): weight for weight in weights}.values())
    if found:
        # What torch does anyway; said aloud, its optimizers do not warn of it at their first sparse step.
        torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]
    return found


def made_of(rows: Tensor, values: Tensor, shape: Sequence[int]) -> Tensor:
    """Make a gradient of row numbers, in order and each once, and their values."""
    return torch.sparse_coo_tensor(
        rows.unsqueeze(0), values, tuple(shape), is_coalesced=True, check_invariants=False
    )


def coalesced(gradient: Tensor) -> Tensor:
    """Return the gradient of a table with each row once, in order; raise where it is no gradient of rows."""
    if not gradient.is_sparse:
        raise InputError(
            f"an embedding of shape {tuple(gradient.shape)} has sparse=True, but its gradient is dense: its weight is also used "
            "otherwise (tied with a head, in a penalty). Leave sparse=True out."
        )
    return gradient.coalesce()


def parts_of(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return the row numbers of a gradient, in order and each once, and their values."""
    gradient = coalesced(gradient)
    return gradient.indices()[0], gradient.values()


def add(left: Gradients, right: Gradients) -> Gradients:
    """Add lists in which some gradients are rows."""
    pairs = list(zip_longest(left, right))
    is_sparse = [any(one is not None and one.is_sparse for one in pair) for pair in pairs]
    dense = iter(
        tree.add(
            [a for (a, _), apart in zip(pairs, is_sparse, strict=True) if not apart],
            [b for (_, b), apart in zip(pairs, is_sparse, strict=True) if not apart],
        )
    )
    return [_add_rows(*pair) if apart else next(dense) for pair, apart in zip(pairs, is_sparse, strict=True)]


def _add_rows(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    if left is None or right is None:
        found = right if left is None else left
        return None if found is None else coalesced(found)
    (left_rows, left_values), (right_rows, right_values) = parts_of(left), parts_of(right)
    rows, places = torch.unique(torch.cat([left_rows, right_rows]), return_inverse=True)
    left_places, right_places = places[: len(left_rows)], places[len(left_rows) :]
    # Minus zero is what adds nothing to anything, a minus zero included.
    values = left_values.new_full((len(rows), *left_values.shape[1:]), -0.0)
    values[left_places] = left_values
    values[right_places] += right_values
    return made_of(rows, values, left.shape)


def take(sparse: Sequence[nn.Parameter]) -> Gradients:
    """Take the gradients of a finished shard, coalesced."""
    taken: Gradients = [None if one.grad is None else coalesced(one.grad) for one in sparse]
    for one in sparse:
        one.grad = None
    return taken


def gather(
    world: World, shards: int, nodes: Sequence[tuple[Subtree, Gradients]], sparse: Sequence[nn.Parameter]
) -> Gradients:
    """Sum the rows of all workers along the tree, on every worker."""
    sent = [
        (node, [None if one is None else tuple(part.cpu() for part in parts_of(one)) for one in held])
        for node, held in nodes
    ]
    total = tree.TreeSum(shards, add)
    for node, held in (row for rows in all_gather_object(world.comm, sent) for row in rows):
        placed: Gradients = [
            None if one is None else made_of(one[0], one[1], parameter.shape).to(world.device)
            for one, parameter in zip(held, sparse, strict=True)
        ]
        total.add(node, placed)
    return total.nodes[0][1] if total.nodes else []


def norms(gradient: Tensor) -> Tensor:
    """Return the norm of each row: the norm of these is that of the gradient."""
    values = parts_of(gradient)[1]
    found: Tensor = torch.linalg.vector_norm(values.flatten(1), dim=1)
    return found


def check_terms(sparse: Sequence[nn.Parameter]) -> None:
    """Refuse auxiliary terms beside such gradients."""
    if sparse:
        raise InputError(
            "a loss with auxiliary terms needs dense gradients, but an embedding of the model has sparse=True. "
            "Leave sparse out, or add the terms to the loss itself."
        )
