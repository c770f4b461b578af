"""Gradients that are rows: added along the tree row by row, and sharded by rows without another bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import InputError
from paceline.reduce.tree import TreeSum
from paceline.strategies import gradients, reducer, sparse

SHAPE = (40, 3)


def rows(seed: int, count: int = 9) -> Tensor:
    """Draw a gradient as a backward pass gives it: rows in any order, some more than once."""
    torch.sparse.check_sparse_tensor_invariants.disable()  # else torch 2.11 warns once in a process
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(SHAPE[0], (1, count), generator=draw)
    return torch.sparse_coo_tensor(ids, torch.randn(count, 3, generator=draw), SHAPE, check_invariants=False)


def summed(leaves: list[Tensor | None]) -> Tensor:
    tree = TreeSum(len(leaves), sparse.add)
    for place, leaf in enumerate(leaves):
        tree.add((place, place + 1), [leaf])
    ((_, (total,)),) = tree.nodes
    assert total is not None
    return total


def test_the_sum_is_the_dense_one() -> None:
    leaves = [rows(seed) for seed in range(5)]
    dense = TreeSum(5)
    for place, leaf in enumerate(leaves):
        dense.add((place, place + 1), [leaf.coalesce().to_dense()])
    total = summed(list(leaves))
    assert total.is_coalesced()
    assert torch.equal(total.to_dense(), dense.nodes[0][1][0])
    touched = torch.cat([leaf._indices()[0] for leaf in leaves]).unique()
    assert torch.equal(total.indices()[0], touched)


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    leaves = [rows(seed, 30) for seed in range(6)]
    whole = summed(list(leaves))

    def low(gradient: Tensor) -> Tensor:
        numbers, values = sparse.parts_of(gradient)
        return sparse.made_of(numbers[numbers < 17], values[numbers < 17], SHAPE)

    part, same = summed([low(leaf) for leaf in leaves]), low(whole)
    assert torch.equal(part.indices(), same.indices())
    assert part.values().numpy().tobytes() == same.values().numpy().tobytes()
    assert torch.equal(sparse.norms(part), sparse.norms(whole)[: len(part.values())])


def test_none_adds_nothing_and_minus_zero_stays() -> None:
    zero = sparse.made_of(torch.tensor([4]), torch.full((1, 3), -0.0), SHAPE)
    other = sparse.made_of(torch.tensor([7]), torch.ones(1, 3), SHAPE)
    total = summed([None, zero, None, other])
    assert total.indices().tolist() == [[4, 7]]
    assert torch.signbit(total.values()[0]).all()
    assert sparse.add([None, torch.ones(2)], [None])[0] is None


def test_dense_gradients_beside_rows_are_added_as_ever() -> None:
    left, right = rows(1), rows(2)
    total = sparse.add([torch.ones(2), left, torch.ones(1)], [torch.ones(2), right])
    assert [one.is_sparse for one in total if one is not None] == [False, True, False]
    assert torch.equal(total[0], torch.full((2,), 2.0))
    assert torch.equal(total[2], torch.ones(1))


@pytest.mark.parametrize("max_grad_norm", [None, 0.1, 1e6])
def test_normalised_and_clipped_as_dense_ones(max_grad_norm: float | None) -> None:
    table, bias = rows(3).coalesce(), torch.randn(5, generator=torch.Generator().manual_seed(0))
    dense = [table.to_dense(), bias.clone()]
    expected = gradients.finish(dense, 0.5, max_grad_norm)
    norm = reducer.norm_of([table, bias])
    assert norm is not None
    norm, factor = norm * 0.5, 0.5
    if max_grad_norm is not None:
        factor = gradients.clipped(norm, 0.5, max_grad_norm)
    gradients.scale([table.values(), bias], factor)
    torch.testing.assert_close(table.to_dense(), dense[0])
    torch.testing.assert_close(bias, dense[1])
    if max_grad_norm is not None:
        torch.testing.assert_close(norm, expected)


def test_tables_are_found_by_what_they_say() -> None:
    shared = nn.Embedding(4, 2, sparse=True)
    frozen = nn.Embedding(4, 2, sparse=True)
    frozen.weight.requires_grad = False
    bag = nn.EmbeddingBag(4, 2, sparse=True)
    model = nn.ModuleList([nn.Embedding(4, 2), shared, frozen, bag, nn.Linear(2, 2), nn.Sequential(shared)])
    assert list(sparse.tables(model)) == ["1", "3"]
    assert [id(one) for one in sparse.sparse_parameters(model)] == [id(shared.weight), id(bag.weight)]


def test_terms_beside_rows_are_refused() -> None:
    sparse.check_terms([])
    with pytest.raises(InputError, match="auxiliary terms"):
        sparse.check_terms([nn.Parameter(torch.zeros(1))])


def test_a_dense_gradient_of_a_table_is_refused_in_one_line() -> None:
    rows = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1, 2), (3, 2))
    with pytest.raises(InputError, match="its gradient is dense"):
        sparse.add([rows], [torch.ones(3, 2)])
