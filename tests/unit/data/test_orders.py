"""Orders of the run's own: the same samples on any number of workers, from any step on, and what is refused."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from paceline.data import Batches, Bucketed, Computed, Curriculum, ShardedLoader, Weighted
from paceline.data.loaders import merged
from paceline.errors import InputError
from tests.unit.data.sources import Squares, combined, epoch_of, loader_of

SAMPLES = 103
LENGTHS = [3 + 7 * number % 41 for number in range(SAMPLES)]


class Numbers(Squares):
    """What is drawn for a sample beside its number; told the epoch."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, self.epoch, torch.rand(()).item()])


class Every(Sampler[int]):
    """Draws from torch."""

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(SAMPLES)[:50].tolist()


class Pairs(Sampler[list[int]]):
    """Batches of one and two."""

    batch_size = 8

    def __iter__(self) -> Iterator[list[int]]:
        for first in torch.randperm(SAMPLES - 8)[:9].tolist():
            yield list(range(first, first + 1 + first % 8))


class Kept(Sampler[int]):
    """Has a generator of its own, whose place nobody can know."""

    def __init__(self) -> None:
        self.draw = np.random.default_rng(3)

    def __iter__(self) -> Iterator[int]:
        yield from self.draw.permutation(SAMPLES).tolist()


def drawn(seed: int, epoch: int) -> Any:
    return torch.randint(SAMPLES, (40 + epoch,))


def batched(seed: int, epoch: int) -> Batches:
    return Batches.of([range(number, number + 1 + number % 5) for number in range(12)])


def from_loader(**options: Any) -> Any:
    """What a DataLoader says, as options of a ShardedLoader."""
    return merged(DataLoader(Numbers(SAMPLES), **options), None, {})


ORDERS: dict[str, Any] = {
    "weighted": Weighted(np.arange(SAMPLES), 60),
    "once": Weighted(np.arange(SAMPLES), 60, replacement=False),
    "bucketed": Bucketed(LENGTHS, 8, window=3),
    "curriculum": Curriculum(LENGTHS, lambda epoch: 0.25 * (epoch + 1)),
    "function": drawn,
    "batches": batched,
    "generator": lambda seed, epoch: (number for number in range(30)),
}


@pytest.mark.parametrize("name", ORDERS)
def test_an_order_is_read_alike_by_any_number_of_workers_from_any_step(name: str) -> None:
    options = {"order": ORDERS[name], "micro_batch": 3}
    alone = combined(Numbers(SAMPLES), workers=1, epoch=1, **options)
    for workers in (2, 3):
        assert combined(Numbers(SAMPLES), workers=workers, epoch=1, **options) == alone
    assert combined(Numbers(SAMPLES), workers=2, epoch=1, start_step=3, **options) == alone[3:]
    assert combined(Numbers(SAMPLES), workers=1, epoch=2, **options) != alone


@pytest.mark.parametrize("name", ["weighted", "batches"])
def test_loading_processes_read_the_same(name: str) -> None:
    options = {"order": ORDERS[name], "micro_batch": 3}
    wanted = combined(Numbers(SAMPLES), workers=1, epoch=1, **options)
    assert combined(Numbers(SAMPLES), workers=1, epoch=1, num_workers=2, **options) == wanted


def ids(name: Any, epoch: int = 0, **options: Any) -> list[list[int]]:
    order = ORDERS[name] if isinstance(name, str) else name
    return [
        [int(row[0]) for shard in step.shards for batch in shard.batches for row in batch]
        for step in epoch_of(Numbers(SAMPLES), epoch=epoch, order=order, **options)
    ]


def flat(batches: list[list[int]]) -> list[int]:
    return [one for batch in batches for one in batch]


def test_weights_are_kept() -> None:
    counts = np.bincount(flat(ids(Weighted([0, 1, 3] + [0] * 100, 4000), batch_size=400)), minlength=4)
    assert counts[0] == 0
    assert counts[3:].sum() == 0
    assert abs(counts[2] - 3000) < 150
    once = flat(ids("once"))
    assert len(set(once)) == 60
    assert 0 not in once
    first = [
        flat(ids(Weighted([1, 3], 1, replacement=False), epoch, batch_size=4, shards=1))[0]
        for epoch in range(400)
    ]
    assert abs(sum(first) - 300) < 40


def test_a_sample_that_comes_twice_is_augmented_twice() -> None:
    (step,) = epoch_of(Numbers(SAMPLES), order=lambda seed, epoch: [5] * 8)
    assert len({row[2].item() for shard in step.shards for batch in shard.batches for row in batch}) == 8


def test_buckets_hold_like_lengths_and_every_sample_once() -> None:
    batches = ids("bucketed")
    assert sorted(flat(batches)) == list(range(SAMPLES))
    assert sorted(map(len, batches)) == [7, *[8] * 12]
    spread = [max(LENGTHS[one] for one in batch) - min(LENGTHS[one] for one in batch) for batch in batches]
    mixed = [max(LENGTHS[one] for one in batch) - min(LENGTHS[one] for one in batch) for batch in ids(drawn)]
    assert np.mean(spread) < np.mean(mixed) / 2
    assert loader_of(Numbers(SAMPLES), order=ORDERS["bucketed"]).steps_per_epoch == 13


def test_a_curriculum_begins_with_what_is_easy() -> None:
    easiest = sorted(LENGTHS)
    for epoch in range(4):
        found = sorted(LENGTHS[one] for one in flat(ids("curriculum", epoch)))
        assert found == easiest[: round(SAMPLES * 0.25 * (epoch + 1))]


def test_an_order_may_be_too_long_to_be_held() -> None:
    class Far(Squares):
        def __getitem__(self, index: int) -> int:
            return index % 7

    class Backwards:
        samples_per_epoch = 10**12

        def __call__(self, seed: int, epoch: int) -> Computed:
            return Computed(10**12, lambda positions: 10**12 - 1 - positions)

    loader = loader_of(Far(10**12), order=Backwards())
    step = next(iter(loader.epoch(0, start_step=10**9)))
    assert loader.steps_per_epoch == 10**12 // 8
    assert step.shards[0].samples.tolist() == [8 * 10**9, 8 * 10**9 + 1]
    loader.close()


@pytest.mark.parametrize(
    ("order", "words"),
    [
        (lambda seed, epoch: [1, SAMPLES], "names sample 103 in epoch 0"),
        (lambda seed, epoch: [-1], "names sample -1"),
        (lambda seed, epoch: [0.5], r"float64 of the shape \[1\]"),
        (lambda seed, epoch: [[1], [2]], "Batches.of"),
        (lambda seed, epoch: 3, "returned int for epoch 0"),
        (lambda seed, epoch: [], "no sample in epoch 0"),
        (lambda seed, epoch: Batches.of([[1], []]), "Each holds one at least"),
        (
            lambda seed, epoch: Batches.of([[1.9], [2]]),
            r"samples of a batch are whole numbers, and float64 of the shape \[1\]",
        ),
        (lambda seed, epoch: Batches.of([[True, False]]), "samples of a batch are whole numbers, and bool"),
        (lambda seed, epoch: Batches([1, 2], [1.5, 1.5]), "sizes of batches are whole numbers, and float64"),
        (
            lambda seed, epoch: Computed(9, lambda positions: positions * 0.5),
            "returned float64 of the shape",
        ),
        (lambda seed, epoch: Batches.of([range(9)]), "batch_size=8 at most"),
        (Bucketed(LENGTHS, 16), "batches of 16 samples and the run has batches of 8"),
        (Curriculum(LENGTHS, lambda epoch: 0), "must be above 0"),
        (Bucketed(LENGTHS[:90], 8), "made for 90 samples, and the data set has 103"),
        (Curriculum(LENGTHS[:90], lambda epoch: 1), "made for 90 samples, and the data set has 103"),
    ],
)
def test_an_order_that_is_none_is_refused(order: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        ids(order)


def test_what_no_weights_can_give_is_refused() -> None:
    with pytest.raises(InputError, match="2 have a weight above 0"):
        Weighted([1, 0, 1], replacement=False)
    with pytest.raises(InputError, match="finite numbers from 0"):
        Weighted([1, -1])
    with pytest.raises(InputError, match="takes no other"):
        loader_of(iter_stream(), order=drawn)


@pytest.mark.parametrize("scale", [1e308, 1e-310, 1.0])
def test_weights_of_any_size_draw_alike(scale: float) -> None:
    held = np.array([0.0, 1.0, 0.0, 1.0, 0.5, 1.0, 0.0])
    for replacement, count in ((True, 400), (False, 4)):
        plain, scaled = (
            Weighted(weights, count, replacement=replacement) for weights in (held, held * scale)
        )
        drawn = [np.asarray(one(0, 0)[np.arange(count)]).tolist() for one in (plain, scaled)]
        assert drawn[0] == drawn[1]
        assert set(drawn[0]) == {1, 3, 4, 5}


def test_a_sample_without_weight_is_never_drawn() -> None:
    beside = [0.0] * 9 + [1.0] + [1e-320] * 9
    for epoch in range(20):
        assert min(Weighted(beside, 10, replacement=False)(0, epoch)) == 9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int64])
def test_a_tensor_may_bring_weights_lengths_and_difficulties(dtype: torch.dtype) -> None:
    brought = torch.arange(1, 9).to(dtype).requires_grad_(dtype.is_floating_point)
    listed = list(range(1, 9))
    pairs = [
        (Weighted(brought, 8), Weighted(listed, 8)),
        (Curriculum(brought, lambda _: 0.5), Curriculum(listed, lambda _: 0.5)),
        (Bucketed(brought, 2), Bucketed(listed, 2)),
    ]
    for one, other in pairs:
        found = [made(3, 1) for made in (one, other)]
        places = [getattr(order, "samples", order) for order in found]
        places = [
            order(3, 1)[np.arange(8)] if isinstance(order, Weighted) else one
            for order, one in zip((one, other), places, strict=True)
        ]
        assert np.array_equal(*places)


@pytest.mark.parametrize("given", [[1j, 2], [[1, 2]], ["1", "2"]])
def test_what_is_no_number_for_each_sample_is_refused(given: Any) -> None:
    for make in (Weighted, lambda one: Bucketed(one, 2), lambda one: Curriculum(one, lambda _: 1)):
        with pytest.raises(InputError, match="are numbers, one for each sample"):
            make(given)


def iter_stream() -> Any:
    from tests.unit.data.sources import Stream

    return Stream(9)


# torch's samplers.


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"batch_size": 8, "sampler": WeightedRandomSampler([1.0] * SAMPLES, 60)}, 60),
        ({"batch_size": 8, "sampler": SubsetRandomSampler(range(10, 60))}, 50),
        ({"batch_size": 8, "sampler": RandomSampler(range(SAMPLES), replacement=True)}, SAMPLES),
        ({"batch_size": 8, "sampler": RandomSampler(range(SAMPLES), num_samples=250)}, 250),
        ({"batch_size": 8, "shuffle": True, "drop_last": True}, 96),
        ({"batch_size": 8, "drop_last": True}, 96),
        ({"batch_size": 8, "sampler": Every()}, 50),
        ({"batch_sampler": BatchSampler(Every(), 8, drop_last=True)}, 48),
        ({"batch_sampler": BatchSampler(SequentialSampler(range(SAMPLES)), 8, drop_last=False)}, SAMPLES),
        ({"batch_sampler": Pairs()}, None),
    ],
)
def test_a_sampler_is_an_order(options: dict[str, Any], count: int | None) -> None:
    dataset, batch_size, said = from_loader(**options)
    said = {key: value for key, value in said.items() if value is not None}
    alone = combined(dataset, workers=1, epoch=1, batch_size=batch_size, **said)
    assert count is None or sum(size for _, size, _ in alone) == count
    for workers, start in ((2, 0), (3, 2)):
        dataset, batch_size, said = from_loader(**options)
        said = {key: value for key, value in said.items() if value is not None}
        again = combined(dataset, workers=workers, epoch=1, start_step=start, batch_size=batch_size, **said)
        assert again == alone[start:]


@pytest.mark.filterwarnings("ignore:.*set_vital")
def test_a_sampler_may_be_of_fewer_samples_than_the_data_set() -> None:
    for sampler in (RandomSampler(range(20)), RandomSampler(range(20), replacement=True, num_samples=90)):
        dataset, _, said = from_loader(batch_size=8, sampler=sampler)
        found = flat(ids(said["order"]))
        assert set(found) <= set(range(20))
        assert len(found) == len(sampler)
    loader = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    assert merged(loader(dataset, batch_size=8, shuffle=True), None, {})[2]["order"] is None


def test_dropping_the_last_batch_changes_no_other() -> None:
    dropping = from_loader(batch_size=8, shuffle=True, drop_last=True)[2]["order"]
    assert ids(dropping, shards=2) == ids(None, shards=2)[:-1]


def test_a_sampler_that_keeps_a_place_is_refused() -> None:
    dataset, _, said = from_loader(batch_size=8, sampler=Kept())
    with pytest.raises(InputError, match="Kept gives another order when it is asked for epoch 0 once more"):
        epoch_of(dataset, order=said["order"])
    with pytest.raises(InputError, match="keeps one part for each rank"):
        from_loader(batch_size=8, sampler=DistributedSampler(Squares(9), num_replicas=2, rank=0))
    with pytest.raises(InputError, match="has one of its own"):
        merged(DataLoader(Squares(9)), None, {"order": drawn})


class Halves(Sampler[Any]):
    """Gives what is no number of a sample."""

    def __iter__(self) -> Iterator[Any]:
        yield from (0, 1.9, torch.tensor(2))


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 8, "sampler": Halves()},
        {"batch_sampler": BatchSampler(Halves(), 2, drop_last=False)},
        {"batch_size": 8, "sampler": SubsetRandomSampler([0, 1.9])},  # type: ignore[list-item]
    ],
)
def test_a_sampler_of_fractions_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"gives 1\.9, and samples are known by whole numbers"):
        epoch_of(Squares(9), order=from_loader(**options)[2]["order"])


class Own(Sampler[int]):
    """Has generators that can be seeded."""

    def __init__(self) -> None:
        self.torch, self.python = torch.Generator(), random.Random(3)

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(SAMPLES, generator=self.torch).tolist()
        yield self.python.randrange(SAMPLES)


def test_generators_of_a_sampler_are_seeded() -> None:
    orders = [from_loader(batch_size=8, sampler=Own())[2]["order"] for _ in range(2)]
    assert ids(orders[0], 1) == ids(orders[1], 1) != ids(orders[0], 0)


def test_drawing_an_order_leaves_the_generators_alone() -> None:
    before = torch.get_rng_state()
    ids(drawn)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_order_is_compared_as_a_whole() -> None:
    def first_of(order: Any, start_step: int = 0) -> Any:
        loader = loader_of(Squares(SAMPLES), order=order)
        step = next(iter(loader.epoch(0, start_step, contents=True, beginning=True)))
        loader.close()
        return step

    step, later = first_of(drawn), first_of(drawn, start_step=2)
    assert step.contents == step.beginning == later.contents == later.beginning
    assert first_of(lambda seed, epoch: [*range(39), 5]).contents != step.contents
    assert first_of(drawn, start_step=5).size == 0


def test_set_epoch_is_told_where_tensors_are_not_plain() -> None:
    dataset: Dataset[Any] = Numbers(SAMPLES)
    loader = ShardedLoader(dataset, batch_size=8, shards=1, seed=0, owned=range(1), num_workers=1)
    for epoch in (0, 1):
        rows = [row for step in loader.epoch(epoch) for batch in step.shards[0].batches for row in batch]
        assert {int(row[1]) for row in rows} == {epoch}
    loader.close()
