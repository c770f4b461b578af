"""Streams: each item goes to one worker, a resume continues, and nothing leaks into the training process."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import IterableDataset

from tests.unit.data.sources import SeekableStream, Stream, combined, epoch_of, loader_of


class Lines:
    """Any object with __iter__, not one of torch's classes."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[int]:
        return iter(range(100, 100 + self.samples))


@settings(deadline=None)
@given(samples=st.integers(1, 40), shards=st.integers(1, 5), beyond=st.integers(0, 6), data=st.data())
def test_every_item_goes_to_one_worker_and_a_resume_continues(
    samples: int, shards: int, beyond: int, data: st.DataObject
) -> None:
    options: dict[str, Any] = {"shards": shards, "batch_size": shards + beyond}
    whole = combined(Lines(samples), workers=1, **options)
    read = [index for _, _, parts in whole for _, indices, _ in parts for index in indices]
    values = [
        value for _, _, parts in whole for _, _, batches in parts for batch in batches for value in batch
    ]
    assert read == list(range(samples))
    assert values == list(range(100, 100 + samples))
    workers = data.draw(st.integers(1, shards))
    start = data.draw(st.integers(0, len(whole)))
    assert combined(Lines(samples), workers=workers, start_step=start, **options) == whole[start:]


def test_draws_of_a_stream_do_not_depend_on_the_process_nor_disturb_it() -> None:
    alone = combined(Stream(30), workers=1)
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    before = torch.get_rng_state(), random.getstate(), str(np.random.get_state(legacy=False))
    loader = loader_of(Stream(30))
    for step in loader.epoch(0):
        assert torch.equal(torch.get_rng_state(), before[0])
        assert random.getstate() == before[1]
        assert str(np.random.get_state(legacy=False)) == before[2]
        assert len(step.shards) == 4
    torch.rand(3)  # what the model draws between the steps
    assert combined(Stream(30), workers=3) == alone
    assert combined(Stream(30), workers=2, start_step=2) == alone[2:]
    assert combined(Stream(30), workers=1, epoch=1) != alone


class Drawing(Mapping[str, Tensor]):
    """An item that draws whenever it is looked into."""

    def __getitem__(self, key: str) -> Tensor:
        return torch.tensor([torch.rand(()).item(), np.random.rand(), random.random()])

    def __iter__(self) -> Iterator[str]:
        return iter(["x"])

    def __len__(self) -> int:
        return 1


class Drawings:
    def __iter__(self) -> Iterator[Drawing]:
        return (Drawing() for _ in range(20))


def test_items_that_draw_give_the_same_where_their_contents_are_compared() -> None:
    first, second = (
        [
            batch["x"].tolist()
            for step in loader_of(Drawings()).epoch(0, contents=compares)
            for shard in step.shards
            for batch in shard.batches
        ]
        for compares in (False, True)
    )
    assert first == second


def test_a_stream_that_can_seek_is_not_read_from_its_beginning() -> None:
    whole = combined(SeekableStream(30), workers=1)
    stream = SeekableStream(30)
    assert combined(stream, workers=1, start_step=2) == whole[2:]
    assert stream.read == list(range(16, 30))
    assert combined(stream, workers=1) == whole  # and a new epoch begins at the beginning


def test_the_length_of_a_stream_is_known_only_where_it_says_so() -> None:
    class Measured(Lines):
        def __len__(self) -> int:
            return self.samples

    assert (loader_of(Lines(9)).samples, loader_of(Lines(9)).steps_per_epoch) == (None, None)
    assert (loader_of(Measured(9)).samples, loader_of(Measured(9)).steps_per_epoch) == (9, 2)


def test_micro_batches_and_collate_apply_to_streams() -> None:
    steps = epoch_of(Lines(8), shards=2, micro_batch=3, collate=lambda items: items)
    assert [shard.batches for shard in steps[0].shards] == [
        [[100, 101, 102], [103]],
        [[104, 105, 106], [107]],
    ]


class Broken(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(13)
        raise LookupError("the file ends here")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_of_a_stream_arrives_as_it_is_and_names_the_sample(num_workers: int) -> None:
    loader = loader_of(Broken(), num_workers=num_workers)
    steps = loader.epoch(0)
    assert next(steps).size == 8
    with pytest.raises(LookupError, match="the file ends here") as caught:
        next(steps)
    loader.close()
    assert any("sample 13 of the stream" in note for note in caught.value.__notes__)


@pytest.mark.parametrize(("start", "sizes"), [(0, [8] * 5), (2, [8] * 3), (4, [8]), (5, [0]), (7, [0])])
def test_a_step_of_no_items_stands_only_where_no_other_is_left(start: int, sizes: list[int]) -> None:
    """Behind real steps it would stand for a stream that ended where it began to be read."""
    loader = loader_of(Stream(40), batch_size=8, shards=2)
    assert [step.size for step in loader.epoch(0, start, beginning=True)] == sizes
