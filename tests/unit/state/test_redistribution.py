"""Which parts of tensors go from whom to whom when a sharded state is cut anew."""

import torch
from hypothesis import given
from hypothesis import strategies as some

from paceline.state import redistribution
from paceline.state.chunks import ChunkBounds, TensorChunk, TensorMeta, index_of, rows_of
from paceline.state.optimizer_state import optimizer_state, outside_name
from paceline.state.redistribution import counted, lacking, overlap, own_bounds, plan, remaining

SHAPE = (7, 5)


@some.composite
def boxes(draw):
    offset = [draw(some.integers(0, length)) for length in SHAPE]
    shape = [draw(some.integers(0, length - start)) for start, length in zip(offset, SHAPE, strict=True)]
    return ChunkBounds(tuple(offset), tuple(shape))


def marked(*parts):
    """Return how many of the parts each place of the tensor is in."""
    count = torch.zeros(SHAPE, dtype=torch.int64)
    for part in parts:
        part.of(count).add_(1)
    return count


@given(boxes(), some.lists(boxes(), max_size=4))
def test_what_remains_is_each_place_once_that_nobody_else_has(wanted, held):
    left = remaining([wanted], held)
    assert torch.equal(marked(*left), (marked(wanted) - marked(*held).clamp(max=1)).clamp(min=0))
    assert all(part.numel for part in left)


@given(boxes(), boxes())
def test_an_overlap_is_what_both_have(one, other):
    common = overlap(one, other)
    both = marked(one) * marked(other)
    assert torch.equal(both, torch.zeros_like(both) if common is None else marked(common))


def held(bounds, *, key="model/weight", shape=SHAPE):
    return {key: TensorChunk(torch.empty(bounds.shape), bounds, TensorMeta(shape, torch.float32))}


def rows(workers, rank):
    """Return the rows that one of several workers has."""
    start, stop = (place * SHAPE[0] // workers for place in (rank, rank + 1))
    return ChunkBounds((start, 0), (stop - start, SHAPE[1]))


@given(some.integers(1, 5), some.integers(1, 5), some.booleans())
def test_everybody_is_sent_what_it_lacks_and_nothing_else(before, after, small):
    mine = [held(rows(before, rank)) if rank < before else {} for rank in range(max(before, after))]
    wants = [{"model/weight": rows(after, rank)} if rank < after else {} for rank in range(len(mine))]
    found = index_of([rows_of(one) for one in mine])
    redistribution.MESSAGE, limit = (16 if small else redistribution.MESSAGE), redistribution.MESSAGE
    try:
        messages = plan(found, [lacking(want, [one]) for want, one in zip(wants, mine, strict=True)])
    finally:
        redistribution.MESSAGE = limit
    for rank, (want, one) in enumerate(zip(wants, mine, strict=True)):
        got = [part for message in messages if message.receiver == rank for _, part in message.parts]
        had = [chunk.bounds for chunk in one.values()]
        assert torch.equal(marked(*got), marked(*remaining(want.values(), had)))
    for message in messages:
        assert message.sender != message.receiver
        (source,) = [chunk.bounds for chunk in mine[message.sender].values()]
        assert all(overlap(part, source) == part for _, part in message.parts)
        if small:
            assert sum(part.numel * 4 for _, part in message.parts) <= 16


def test_a_scalar_and_a_tensor_without_values_are_whole_or_not_there():
    (nothing, scalar) = ChunkBounds.whole((0, 3)), ChunkBounds.whole(())
    assert remaining([nothing], []) == []
    assert remaining([scalar], []) == [scalar]
    assert remaining([scalar], [scalar]) == []


def test_slots_are_cut_as_their_parameter_and_what_is_not_shaped_like_it_is_whole():
    mine = held(rows(3, 1))
    whole = TensorMeta(SHAPE, torch.float32)
    catalogue = {
        "model/weight": whole,
        "model/others": whole,
        "optimizer/weight/exp_avg": whole,
        "optimizer/weight/step": TensorMeta((), torch.float32),
        "optimizer/others/exp_avg": whole,
        "optimizer/outside_proj.weight/exp_avg": whole,
        f"optimizer/{outside_name(0)}/exp_avg": TensorMeta((2,), torch.float32),
    }
    assert own_bounds(mine, catalogue) == {
        "model/weight": rows(3, 1),
        "optimizer/weight/exp_avg": rows(3, 1),
        "optimizer/weight/step": ChunkBounds.whole(()),
        f"optimizer/{outside_name(0)}/exp_avg": ChunkBounds.whole((2,)),
    }


def test_only_chunks_that_the_index_counts_are_used():
    upper, lower, between = (held(bounds) for bounds in (rows(2, 0), rows(2, 1), rows(3, 1)))
    found = index_of([rows_of(upper), rows_of(lower)])
    longer = held(rows(2, 0), shape=(9, 5))
    unknown = held(rows(2, 0), key="model/other")
    assert counted([upper, lower, between, longer, unknown], found) == [upper, lower, {}, {}, {}]
    wanted = {"model/weight": rows(3, 1)}
    assert lacking(wanted, counted([between], found)) == {"model/weight": [rows(3, 1)]}


def test_a_part_of_a_tensor_that_another_holds_whole_is_used():
    part = held(rows(2, 0))
    found = index_of([rows_of(held(ChunkBounds.whole(SHAPE))), rows_of(part)])
    assert counted([part], found) == [part]


def test_a_parameter_that_an_optimizer_has_and_the_model_has_not_is_known_by_its_name():
    model, own = torch.nn.Linear(2, 1, bias=False), torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([*model.parameters(), own])
    (group,) = optimizer_state(model, optimizer)["groups"]
    assert group["params"] == ["weight", outside_name(1)]
