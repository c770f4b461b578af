"""Reading in the worker itself: both paths agree, draws belong to samples, errors name them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset, default_collate

from paceline.data.reading import reader_of
from paceline.errors import InputError
from tests.unit.data.sources import Faulty, Noisy, Squares, TwoPartError, combined, epoch_of


class AlsoTensors(TensorDataset):
    """Not exactly a TensorDataset, so it is read item by item."""


@pytest.mark.parametrize("micro_batch", [None, 1])
def test_a_tensor_data_set_is_read_as_its_items_would_be(micro_batch: int | None) -> None:
    tensors = (
        torch.randn(50, 3, 4),
        torch.randint(0, 9, (50,)),
        torch.randn(4, 50, 2).transpose(0, 1),
        torch.rand(50, 2, dtype=torch.float64) > 0.5,
        torch.randn(50, 5).bfloat16(),
        torch.randn(50, 2, dtype=torch.complex64)[:, :1].expand(50, 3),
    )
    quick = epoch_of(TensorDataset(*tensors), micro_batch=micro_batch)
    slow = epoch_of(AlsoTensors(*tensors), micro_batch=micro_batch)
    batches = 0
    for left, right in zip(quick, slow, strict=True):
        for one, other in zip(left.shards, right.shards, strict=True):
            assert one.samples.tolist() == other.samples.tolist()
            for got, expected in zip(one.batches, other.batches, strict=True):
                batches += 1
                assert type(got) is type(expected)
                for this, that in zip(got, expected, strict=True):
                    assert this.dtype == that.dtype
                    assert this.stride() == that.stride()
                    assert torch.equal(this, that)
    assert batches == (26 if micro_batch is None else 50)


class Many(Squares):
    """Gives many samples in one call, and counts the calls."""

    calls = 0

    def __getitems__(self, indices: list[int]) -> list[int]:
        Many.calls += 1
        return [index * index for index in indices]


def test_getitems_is_called_once_for_a_micro_batch() -> None:
    Many.calls = 0
    assert combined(Many(40), workers=1) == combined(Squares(40), workers=1)
    assert Many.calls == 5 * 4


def states() -> list[Any]:
    return [torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state(legacy=False))]


def test_draws_belong_to_the_sample_and_not_to_batch_shard_or_worker() -> None:
    by_sample: dict[int, list[float]] = {}
    for options in (
        {"workers": 1},
        {"workers": 2},
        {"workers": 3},
        {"workers": 1, "batch_size": 5},
        {"workers": 1, "shards": 1, "micro_batch": 3},
    ):
        torch.manual_seed(len(by_sample))  # the process's own state must not matter
        for _, _, shards in combined(Noisy(21), epoch=2, **options):
            for _, indices, batches in shards:
                for index, values in zip(indices, [row for batch in batches for row in batch], strict=True):
                    assert by_sample.setdefault(index, values) == values
    assert sorted(by_sample) == list(range(21))
    drawn = [tuple(values[1:]) for index, values in by_sample.items() if index % 2]
    assert len(set(drawn)) == len(drawn) == 10

    other_epoch = {
        row[0]: row
        for _, _, s in combined(Noisy(21), workers=1, epoch=3)
        for _, _, b in s
        for x in b
        for row in x
    }
    assert all(other_epoch[index] != by_sample[index] for index in range(1, 21, 2))


@pytest.mark.parametrize("dataset", [Noisy(40), Squares(40), TensorDataset(torch.arange(40))])
def test_loading_leaves_the_generators_of_the_training_process_alone(dataset: Dataset[Any]) -> None:
    before = states()
    epoch_of(dataset)
    assert states() == before


class RarelyRandom(Squares):
    """Draws for one sample only, so most steps cannot know."""

    def __getitem__(self, index: int) -> float:
        return random.random() if index == 33 else float(index)


def test_a_data_set_that_draws_for_one_sample_only_is_caught() -> None:
    random.seed(1)
    first = combined(RarelyRandom(40), workers=1)
    random.seed(2)
    assert combined(RarelyRandom(40), workers=2) == first


def test_a_collate_function_that_draws_gives_the_same_on_any_number_of_workers() -> None:
    def masked(items: list[int]) -> torch.Tensor:
        return torch.tensor(items) * torch.rand(len(items))

    alone = combined(Squares(40), workers=1, collate=masked)
    torch.manual_seed(99)
    assert combined(Squares(40), workers=3, collate=masked) == alone


@pytest.mark.parametrize("wrap", [lambda data: data, lambda data: Subset(data, list(range(20)))])
@pytest.mark.parametrize("error", [TwoPartError("box", 3), KeyError("missing"), OSError(5, "no disk")])
def test_an_error_of_the_data_set_arrives_as_it_is_and_names_the_sample(wrap: Any, error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        epoch_of(wrap(Faulty(20, bad=13, error=error)), epoch=1)
    assert caught.value is error
    assert any("sample 13 " in note and "epoch 1" in note for note in caught.value.__notes__)


def test_an_error_of_the_collate_function_names_the_samples() -> None:
    def broken(items: list[int]) -> Any:
        return default_collate(items) if 0 not in items else 1 / 0

    with pytest.raises(ZeroDivisionError) as caught:
        epoch_of(Squares(8), shuffle=False, collate=broken)
    assert caught.value.__notes__ == ["while collating samples [0, 1], in epoch 0"]


@pytest.mark.parametrize("kind", ["tensor", "array", "list"])
def test_a_collate_that_changes_the_data_sets_own_items_is_refused(kind: str) -> None:
    rows: Any = {
        "tensor": torch.ones(8, 3),
        "array": np.ones((8, 3)),
        "list": [torch.ones(3) for _ in range(8)],
    }[kind]

    def doubling(items: Any) -> Any:
        for item in items:
            item["x"][...] *= 2
        return torch.stack([torch.as_tensor(item["x"]) for item in items])

    def once(items: Any) -> Any:
        return torch.stack([torch.as_tensor(item["x"]) * 2 for item in items])

    shared = [{"x": row} for row in rows]
    pieces = [np.array([3, 1]), np.array([2])]
    with pytest.raises(InputError, match="collate changes sample 3 in place, and with it the data set's own"):
        reader_of(shared, seed=0, collate=doubling).read(0, pieces)
    reader_of(shared, seed=0, collate=once).read(0, pieces)

    class Fresh:
        def __getitem__(self, index: int) -> Any:
            return {"x": rows[index].clone() if kind != "array" else rows[index].copy()}

    assert len(reader_of(Fresh(), seed=0, collate=doubling).read(0, pieces)) == 2  # nobody reads those again


def test_an_item_of_the_data_sets_own_is_found_behind_one_that_is_fresh() -> None:
    labels = torch.zeros(4)

    def marking(items: list[Any]) -> Any:
        for image, label in items:
            image.mul_(2)
            label.add_(1)
        return items

    class Images:
        def __getitem__(self, index: int) -> Any:
            return torch.ones(2), labels[index]

    with pytest.raises(InputError, match="collate changes sample 3 in place"):
        reader_of(Images(), seed=0, collate=marking).read(0, [np.array([3, 1])])


class _Refilled:
    """Collates into the same memory each time, and returns the same list and dict."""

    def __init__(self) -> None:
        self.numbers, self.array = torch.zeros(64), np.zeros(64)
        self.batch: list[Any] = []
        self.named: dict[str, Any] = {}

    def __call__(self, items: list[Any]) -> Any:
        values = torch.tensor([float(item) for item in items])
        self.numbers[: len(items)] = values
        self.array[: len(items)] = values.numpy()
        self.named["array"] = self.array[: len(items)]
        self.batch[:] = [self.numbers[: len(items)], self.named, torch.from_numpy(self.array)[: len(items)]]
        return self.batch


class _Counted(IterableDataset[int]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.samples))


@pytest.mark.parametrize("source", [Squares, _Counted])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_collate_that_fills_the_same_memory_again_gives_each_batch_its_own(
    source: type[Any], num_workers: int
) -> None:
    whole = [
        batch
        for step in epoch_of(
            source(40), collate=_Refilled(), shards=4, num_workers=num_workers, batch_size=16, micro_batch=2
        )
        for shard in step.shards
        for batch in shard.batches
    ]
    plain = [
        batch.double()
        for step in epoch_of(source(40), collate=torch.tensor, shards=4, batch_size=16, micro_batch=2)
        for shard in step.shards
        for batch in shard.batches
    ]
    assert len(whole) == len(plain) == 20
    for (numbers, named, array), expected in zip(whole, plain, strict=True):
        assert numbers.tolist() == named["array"].tolist() == array.tolist() == expected.tolist()


def test_work_in_place_on_a_batch_of_a_collate_leaves_the_data_set_alone() -> None:
    """As detection models have it: the batch is a tuple of the items themselves."""
    images = [torch.full((2,), float(index)) for index in range(8)]
    arrays = [np.full(2, float(index)) for index in range(8)]

    class Pictures(Dataset[Any]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            return images[index], torch.from_numpy(arrays[index]), arrays[index]

    for step in epoch_of(Pictures(), collate=lambda items: tuple(zip(*items, strict=True)), batch_size=4):
        for shard in step.shards:
            for batch in shard.batches:
                for column in batch:
                    for one in column:
                        one *= 2  # noqa: PLW2901
    assert [float(image[0]) for image in images] == [*range(8)]
    assert [float(array[0]) for array in arrays] == [*range(8)]
