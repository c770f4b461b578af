"""Who writes what: every chunk once, by one who holds it, the load evened out."""

from __future__ import annotations

import pytest
import torch

from paceline.checkpoint.compare import same
from paceline.checkpoint.planning import ALONE, ShardInventory, assign_writers
from paceline.checkpoint.staging import Staging
from paceline.errors import CheckpointError
from paceline.state.chunks import ChunkBounds, TensorChunk, TensorMeta

BIG = TensorMeta((8, ALONE // 16), torch.float32)
SMALL = TensorMeta((4, 4), torch.float32)


def offer(**chunks: tuple[TensorMeta, ChunkBounds]) -> ShardInventory:
    return ShardInventory("host", {f"model/{name}": chunk for name, chunk in chunks.items()}, {})


def whole(meta: TensorMeta) -> tuple[TensorMeta, ChunkBounds]:
    return meta, ChunkBounds.whole(meta.shape)


def rows(meta: TensorMeta, start: int, count: int) -> tuple[TensorMeta, ChunkBounds]:
    return meta, ChunkBounds((start, 0), (count, meta.shape[1]))


def test_little_is_written_by_the_first_alone_and_much_by_all() -> None:
    few = [offer(a=whole(SMALL), b=whole(SMALL))] * 3
    assert assign_writers(few).writers == (0,)
    many = [offer(a=whole(BIG), b=whole(BIG), c=whole(BIG))] * 3
    plan = assign_writers(many)
    assert plan.writers == (0, 1, 2)
    assert sorted(plan.keys) == [("model/a",), ("model/b",), ("model/c",)]


def test_chunks_are_written_by_their_holders_and_each_once() -> None:
    left, right = offer(a=rows(SMALL, 0, 2), b=whole(SMALL)), offer(a=rows(SMALL, 2, 2), b=whole(SMALL))
    plan = assign_writers([left, right, left, right])
    assert plan.writers == (0, 1)
    assert plan.keys == (("model/a", "model/b"), ("model/a",))
    assert [bounds.part for bounds in plan.tensors["model/a"].chunks] == [0, 1]


def test_of_what_somebody_holds_whole_nobody_writes_chunks() -> None:
    plan = assign_writers([offer(a=rows(SMALL, 0, 2)), offer(a=rows(SMALL, 2, 2)), offer(a=whole(SMALL))])
    assert (plan.writers, plan.keys) == ((2,), (("model/a",),))


def test_what_nobody_holds_is_refused() -> None:
    with pytest.raises(CheckpointError, match="chunks do not make up whole tensors") as caught:
        assign_writers([offer(a=rows(SMALL, 0, 2)), offer(a=rows(SMALL, 2, 1))])
    assert "\n" not in str(caught.value)


def test_models_that_differ_are_refused() -> None:
    with pytest.raises(CheckpointError, match="Make the same model on all workers"):
        assign_writers([offer(a=whole(SMALL)), offer(a=whole(BIG))])


def test_tied_weights_are_stored_once_where_all_agree() -> None:
    weight = torch.randn(4, 4)
    tied = ShardInventory.of(
        "host", {"model/a": TensorChunk.whole(weight), "model/b": TensorChunk.whole(weight)}
    )
    apart = ShardInventory.of(
        "host", {"model/a": TensorChunk.whole(weight), "model/b": TensorChunk.whole(weight.clone())}
    )
    assert assign_writers([tied, tied]).aliases == {"model/b": "model/a"}
    assert list(assign_writers([tied, tied]).tensors) == ["model/a"]
    assert list(assign_writers([tied, apart]).tensors) == ["model/a", "model/b"]


def test_copies_are_of_their_own_and_their_memory_is_used_again() -> None:
    staging = Staging()
    kinds = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn]
    tensors = {str(kind): torch.arange(15).reshape(3, 5).to(kind).t() for kind in kinds}
    tensors |= {"one": torch.tensor(3.0), "none": torch.empty(0, 2)}
    first = staging.copies(tensors)
    kept = {key: value.clone() for key, value in tensors.items()}
    for value in tensors.values():
        value.zero_()
    for key, value in first.items():
        assert value.is_contiguous()
        assert same(value, kept[key])
    again = staging.copies(tensors)
    assert all(again[key].data_ptr() == first[key].data_ptr() for key in first)
    larger = staging.copies({"large": torch.ones(10_000), **kept})
    assert torch.equal(larger["large"], torch.ones(10_000))
