"""What all workers read together does not depend on how many they are, nor on where they resumed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from paceline.data import Order, ShardedLoader, StepData
from paceline.data.orders import Rounds
from paceline.errors import InputError
from tests.unit.data.sources import Squares, Stream, combined, loader_of

cuts = st.fixed_dictionaries(
    {
        "samples": st.integers(1, 60),
        "shards": st.integers(1, 6),
        "beyond": st.integers(0, 12),
        "micro_batch": st.none() | st.integers(1, 5),
        "shuffle": st.booleans(),
        "seed": st.integers(0, 2**40),
    }
)


def options_of(cut: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    options = {key: cut[key] for key in ("shards", "micro_batch", "shuffle", "seed")}
    return cut["samples"], {**options, "batch_size": cut["shards"] + cut["beyond"]}


@settings(deadline=None)
@given(cut=cuts, data=st.data())
def test_any_number_of_workers_reads_the_same_and_every_sample_once(
    cut: dict[str, Any], data: st.DataObject
) -> None:
    samples, options = options_of(cut)
    workers = data.draw(st.integers(1, options["shards"]))
    alone = combined(Squares(samples), workers=1, **options)
    together = combined(Squares(samples), workers=workers, **options)
    assert together == alone

    read = [index for _, _, shards in together for _, indices, _ in shards for index in indices]
    assert sorted(read) == list(range(samples))
    assert sum(size for _, size, _ in together) == samples
    assert [step for step, _, _ in together] == list(range(-(-samples // options["batch_size"])))
    for _, _, shards in together:
        for _, indices, batches in shards:
            assert [value for batch in batches for value in batch] == [index**2 for index in indices]
            assert all(0 < len(batch) <= (options["micro_batch"] or samples) for batch in batches)


@settings(deadline=None)
@given(cut=cuts, data=st.data())
def test_a_resume_with_any_other_number_of_workers_continues_the_sequence(
    cut: dict[str, Any], data: st.DataObject
) -> None:
    samples, options = options_of(cut)
    workers = data.draw(st.integers(1, options["shards"]))
    whole = combined(Squares(samples), workers=1, epoch=3, **options)
    start = data.draw(st.integers(0, len(whole)))
    assert combined(Squares(samples), workers=workers, epoch=3, start_step=start, **options) == whole[start:]


class Identity(Squares):
    def __getitem__(self, index: int) -> int:
        return index


def test_a_huge_data_set_starts_at_once_anywhere() -> None:
    loader = loader_of(Identity(10**12), batch_size=1000)
    assert loader.samples == 10**12
    assert loader.steps_per_epoch == 10**9
    last = list(loader.epoch(0, 10**9 - 2))
    assert [step.step for step in last] == [10**9 - 2, 10**9 - 1]
    middle = list(itertools.islice(loader.epoch(0, 10**8), 10))
    assert sum(len(shard.samples) for step in middle for shard in step.shards) == 10_000


def test_blocks_of_the_order_do_not_show() -> None:
    loader = loader_of(TensorDataset(torch.arange(20_000)), batch_size=7, shards=3)
    shards = [shard for step in loader.epoch(0) for shard in step.shards]
    read = [index for shard in shards for index in shard.samples.tolist()]
    assert sorted(read) == list(range(20_000))
    assert [value for shard in shards for (batch,) in shard.batches for value in batch.tolist()] == read


def test_a_short_last_batch_may_leave_shards_empty() -> None:
    *_, (step, size, shards) = combined(Squares(10), workers=4, batch_size=8, shards=4)
    assert (step, size) == (1, 2)
    assert [len(indices) for _, indices, _ in shards] == [0, 1, 0, 1]
    assert [len(batches) for _, _, batches in shards] == [0, 1, 0, 1]


def test_a_new_epoch_ends_the_earlier_one() -> None:
    loader = loader_of(Squares(40))
    first = loader.epoch(0)
    next(first)
    second = loader.epoch(1)
    assert list(first) == []
    assert len(list(second)) == 5


def test_a_custom_collate_is_used_for_each_micro_batch() -> None:
    steps = combined(
        Squares(8), workers=1, batch_size=8, shards=2, micro_batch=3, collate=lambda items: [sum(items)]
    )
    for _, _, shards in steps:
        for _, indices, batches in shards:
            squares = [index**2 for index in indices]
            assert batches == [[sum(squares[:3])], [sum(squares[3:])]]


class Endless:
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (Squares(0), {}, "the data set is empty"),
        (Stream(0), {}, "the data set is empty"),
        (Squares(9), {"batch_size": 3}, "a batch of 3 samples cannot be cut into 4 shards"),
        (Squares(9), {"batch_size": 0}, "batch_size is 0"),
        (Squares(9), {"micro_batch": 0}, "micro_batch is 0"),
        (Squares(9), {"num_workers": -1}, "num_workers is -1"),
        (Squares(9), {"prefetch": 0}, "prefetch is 0"),
        (Squares(9), {"collate": 3}, "collate is 3, but must be a function"),
        (Squares(9), {"worker_init_fn": "f"}, "worker_init_fn is 'f', but must be a function"),
        (Endless(), {}, "Endless has __getitem__ but no length"),
        (7, {}, "a int is not a data set"),
        ((item for item in [1, 2]), {}, "can be read only once"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(dataset: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        list(loader_of(dataset, **options).epoch(0))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("owned", [range(2, 2), range(3, 5), range(0, 4, 2)])
def test_a_worker_without_proper_shards_is_refused(owned: range) -> None:
    with pytest.raises(InputError, match="shards"):
        ShardedLoader(Squares(9), batch_size=8, shards=4, seed=0, owned=owned)


class Epochs(Squares):
    """A data set that gives the epoch it was told beside each sample."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        return index, self.epoch


class EpochStream(Stream):
    """A stream in an order that depends on the epoch it was told when it began, as those of Hugging Face."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        order = torch.randperm(self.samples, generator=torch.Generator().manual_seed(self.epoch))
        return iter([(index, self.epoch) for index in order.tolist()])


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_data_set_is_told_the_epoch_wherever_it_is_read(num_workers: int) -> None:
    from torch.utils.data import ConcatDataset, Subset

    plain = Epochs(8)
    for dataset in (plain, Subset(ConcatDataset([Epochs(4), Epochs(4)]), range(8)), EpochStream(8)):
        loader = ShardedLoader(
            dataset, batch_size=4, shards=1, seed=0, owned=range(1), num_workers=num_workers
        )
        orders = []
        for epoch, start in ((0, 0), (1, 0), (2, 1), (1, 1), (1, 0)):
            read = [shard.batches[0] for step in loader.epoch(epoch, start) for shard in step.shards]
            assert {int(told) for _, batch in read for told in batch} == {epoch}
            orders.append([int(index) for batch, _ in read for index in batch])
        loader.close()
        assert orders[0] != orders[1] == orders[4]
        assert orders[3] == orders[1][4:]


def batches(steps: Iterator[StepData]) -> list[Any]:
    return [batch for step in steps for shard in step.shards for batch in shard.batches]


class Scaled(Squares):
    """Its samples are what somebody has made them by now."""

    scale = 1

    def __getitem__(self, index: int) -> int:
        return index * self.scale


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("order", [None, Rounds(20, 20)])
def test_an_epoch_reads_the_data_set_as_it_is_when_it_begins(num_workers: int, order: Order | None) -> None:
    dataset = Scaled(20)
    loader = loader_of(dataset, num_workers=num_workers, order=order)
    sums = []
    for epoch in range(3):
        dataset.scale = 10**epoch
        sums.append(sum(int(batch.sum()) for batch in batches(loader.epoch(epoch))))
    loader.close()
    assert sums == [190, 1900, 19000]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_other_tensors_of_a_data_set_are_read_from_the_next_epoch_on(num_workers: int) -> None:
    dataset = TensorDataset(torch.zeros(20))
    loader = loader_of(dataset, num_workers=num_workers)
    sums = []
    for epoch in range(2):
        dataset.tensors = (torch.full((20,), float(epoch)),)
        sums.append(sum(float(batch[0].sum()) for batch in batches(loader.epoch(epoch))))
    loader.close()
    assert sums == [0.0, 20.0]


@pytest.mark.parametrize("samples", [19, 21])
@pytest.mark.parametrize("order", [None, Rounds(20, 20)])
def test_a_data_set_of_another_length_is_refused_when_an_epoch_begins(
    samples: int, order: Order | None
) -> None:
    dataset = Squares(20)
    loader = loader_of(dataset, order=order)
    list(loader.epoch(0))
    dataset.samples = samples
    with pytest.raises(InputError, match=f"has {samples} samples now, and had 20"):
        loader.epoch(1)


def test_evaluation_of_the_same_data_set_does_not_change_its_epoch() -> None:
    dataset = Epochs(8)
    options: dict[str, Any] = {"batch_size": 4, "shards": 1, "seed": 0, "owned": range(1)}
    train, held_out = ShardedLoader(dataset, **options), ShardedLoader(dataset, shuffle=False, **options)
    told = []
    for step in train.epoch(3):
        told += step.shards[0].batches[0][1].tolist()
        assert [one.shards[0].batches[0][1].tolist() for one in held_out.epoch(0)] == [[0] * 4] * 2
    assert told == [3] * 8
