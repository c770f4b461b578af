"""A stream that is not the same on all workers is refused where it is read, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from paceline.data import ShardedLoader
from paceline.errors import InputError
from paceline.training.checks.same_stream import EVALUATION, TRAINING, read_alike
from paceline.world import World
from tests.unit.recovery.test_loop_exits import group, serving  # noqa: F401  (which closes what `group` opens)


class Items:
    def __init__(self, numbers: Any, make: Callable[[int], Any] = float) -> None:
        self.numbers, self.make = numbers, make

    def __iter__(self) -> Iterator[Any]:
        return map(self.make, self.numbers)


def loader_of(stream: Any, num_workers: int = 0) -> ShardedLoader:
    return ShardedLoader(stream, batch_size=4, shards=1, seed=0, owned=range(1), num_workers=num_workers)


def sizes(
    loader: ShardedLoader, world: World, epoch: int = 0, start: int = 0, which: str = TRAINING
) -> list[int]:
    return [data.size for data in read_alike(loader, world, which, epoch, start)]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("which", [TRAINING, EVALUATION])
def test_a_stream_split_by_rank_is_refused_in_its_first_step(which: str, num_workers: int) -> None:
    worlds = group(2)
    loaders = [loader_of(Items(range(rank, 40, 2)), num_workers) for rank in range(2)]
    first, second = (
        read_alike(loader, world, which, 0) for loader, world in zip(loaders, worlds, strict=True)
    )
    next(first)
    said = rf"the {which} stream gives other items on rank 1 than on rank 0, from item 0 of epoch 0 on \(item: 1\.0 and 0\.0\)"
    with pytest.raises(InputError, match=said) as refused:
        next(second)
    assert "Give the whole stream on every worker" in str(refused.value)
    for loader in loaders:
        loader.close()


def test_items_that_differ_further_on_are_found_there() -> None:
    worlds = group(2)
    loaders = [loader_of(Items([*range(14), *range(14 + 50 * rank, 40 + 50 * rank)])) for rank in range(2)]
    sizes(loaders[0], worlds[0])
    with pytest.raises(InputError, match="from item 12 of epoch 0 on"):
        sizes(loaders[1], worlds[1])


@pytest.mark.parametrize("counts", [(11, 10), (13, 12), (12, 13), (17, 9)])
def test_streams_that_end_at_other_places_are_refused(counts: tuple[int, int]) -> None:
    worlds = group(2)
    loaders = [loader_of(Items([1] * count)) for count in counts]
    sizes(loaders[0], worlds[0])
    with pytest.raises(
        InputError,
        match=f"the training stream ended after {counts[1]} items on rank 1 and after {counts[0]} on rank 0, in epoch 0",
    ):
        sizes(loaders[1], worlds[1])


@pytest.mark.parametrize("counts", [(12, 16), (16, 12), (12, 14)])
def test_they_are_also_where_reading_begins_in_the_middle(counts: tuple[int, int]) -> None:
    worlds = group(2)
    loaders = [loader_of(Items([1] * count)) for count in counts]
    sizes(loaders[0], worlds[0], start=1)
    with pytest.raises(
        InputError, match=f"after {counts[1]} items on rank 1 and after {counts[0]} on rank 0"
    ):
        sizes(loaders[1], worlds[1], start=1)


def test_a_stream_that_parts_in_a_later_epoch_is_refused() -> None:
    class Reshuffled(Items):
        rank = 0

        def set_epoch(self, epoch: int) -> None:
            self.numbers = range(epoch * self.rank, 10 + epoch * self.rank)

    worlds = group(2)
    loaders = []
    for rank in range(2):
        stream = Reshuffled(range(10))
        stream.rank = rank
        loaders.append(loader_of(stream))
    for epoch in range(2):
        sizes(loaders[0], worlds[0], epoch)
    sizes(loaders[1], worlds[1], 0)
    with pytest.raises(InputError, match="from item 0 of epoch 1 on"):
        sizes(loaders[1], worlds[1], 1)


def test_the_same_stream_is_read_in_silence_wherever_reading_begins_and_leaves_little_behind() -> None:
    worlds = group(3)
    loaders = [loader_of(Items(range(22), lambda number: torch.rand(3) + number)) for _ in worlds]
    for epoch in range(40):
        for loader, world in zip(loaders, worlds, strict=True):
            assert sizes(loader, world, epoch, 1) == [4, 4, 4, 4, 2]
            assert sizes(loader, world, 0, 0, EVALUATION) == [4, 4, 4, 4, 4, 2]
    assert worlds[0].store is not None
    assert worlds[0].store.num_keys() < 20


def test_a_group_that_has_formed_anew_compares_again() -> None:
    loaders = [loader_of(Items(range(40))), loader_of(Items(range(40)))]
    for _ in range(2):  # so that the next reading would be the third
        worlds = group(2)
        for loader, world in zip(loaders, worlds, strict=True):
            sizes(loader, world)
    worlds = group(2)
    loaders[0].own(range(1))
    sizes(loaders[0], worlds[0], 0, 2)
    with pytest.raises(InputError, match="from item 8 of epoch 0 on"):
        sizes(loader_of(Items(range(7, 47))), worlds[1], 0, 2)


def test_nothing_is_looked_at_without_others() -> None:
    alone = loader_of(Items(range(8)))
    assert [data.contents for data in read_alike(alone, group(1)[0], TRAINING, 0)] == [None, None]
    data = Numbered(range(8))
    assert sizes(loader_of(data), group(1)[0]) == [4, 4]
    assert sorted(data.read) == list(range(8))


class Numbered:
    """A data set whose samples have numbers."""

    def __init__(self, numbers: Any, make: Callable[[int], Any] = float) -> None:
        self.numbers, self.make, self.read = numbers, make, list[int]()

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, sample: int) -> Any:
        self.read.append(sample)
        return self.make(self.numbers[sample])


def numbered(dataset: Any, num_workers: int = 0) -> ShardedLoader:
    return ShardedLoader(
        dataset, batch_size=4, shards=1, seed=0, owned=range(1), num_workers=num_workers, shuffle=False
    )


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("which", [TRAINING, EVALUATION])
def test_a_data_set_in_another_order_is_refused(which: str, num_workers: int) -> None:
    worlds = group(2)
    loaders = [numbered(Numbered(range(8)[::step]), num_workers) for step in (1, -1)]
    said = (
        rf"the {which} data gives other samples on rank 1 than on rank 0: sample 0 is 7.0 here and 0.0 there"
    )
    try:
        assert sizes(loaders[0], worlds[0], which=which) == [4, 4]
        with pytest.raises(InputError, match=said) as refused:
            sizes(loaders[1], worlds[1], which=which)
        assert "PYTHONHASHSEED" in str(refused.value)
    finally:
        for loader in loaders:
            loader.close()


def test_data_sets_of_other_lengths_and_tensors_are_refused() -> None:
    for first, second, said in (
        (
            TensorDataset(torch.zeros(8, 2)),
            TensorDataset(torch.zeros(9, 2)),
            "9 samples on rank 1 and 8 on rank 0",
        ),
        (
            TensorDataset(torch.zeros(8, 2)),
            TensorDataset(torch.ones(8, 2)),
            r"\[1, 1\] here and \[0, 0\] there",
        ),
    ):
        worlds = group(2)
        sizes(numbered(first), worlds[0])
        with pytest.raises(InputError, match=said):
            sizes(numbered(second), worlds[1])


def test_labels_that_differ_beside_equal_pictures_are_refused() -> None:
    def made(flip: int) -> Callable[[int], Any]:
        return lambda number: (torch.arange(900) + number, (number % 2) ^ flip)

    worlds = group(2)
    sizes(numbered(Numbered(range(9), made(0))), worlds[0])
    with pytest.raises(InputError, match=r"sample 0 is 1 here and 0 there \(item\[1\]\)"):
        sizes(numbered(Numbered(range(9), made(1))), worlds[1])


def test_a_data_set_is_looked_at_once_by_a_group_and_moves_no_generator() -> None:
    worlds = group(2)
    sets = [Numbered(range(9), lambda number: number + torch.rand(3)) for _ in worlds]
    before = torch.get_rng_state()
    for data, world in zip(sets, worlds, strict=True):
        loader = numbered(data)
        for epoch in range(3):
            assert sizes(loader, world, epoch) == [4, 4, 1]
    assert torch.equal(torch.get_rng_state(), before)
    assert sets[0].read[:4] == [0, 2, 5, 8]
    assert sets[0].read == sets[1].read


def test_samples_that_differ_from_themselves_or_by_machine_alone_or_cannot_be_read_are_left_alone() -> None:
    generator = torch.Generator().manual_seed(5)

    def flipped(number: int) -> Any:
        return torch.full((4,), float(number)) * (1 if torch.rand(1, generator=generator) < 0.9 else -1)

    def on(rank: int) -> Callable[[int], Any]:
        return lambda number: (torch.full((4,), float(number)), f"machine {rank}")

    def absent(number: int) -> Any:
        if number in (0, 5):
            raise OSError(number)
        return number

    for made in (lambda _: flipped, on):
        worlds = group(2)
        for rank, world in enumerate(worlds):
            assert sizes(numbered(Numbered(range(9), made(rank))), world) == [4, 4, 1]
    for world in group(2):
        loader = ShardedLoader(
            Numbered(range(9), absent),
            batch_size=4,
            shards=1,
            seed=0,
            owned=range(1),
            order=lambda _seed, _epoch: [1, 2, 3, 4],
        )
        assert sizes(loader, world) == [4]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_is_drawn_rarely_is_seen_to_be_drawn_and_the_first_worker_tells(num_workers: int) -> None:
    """Each draws another value once in a hundred readings, and the second does so where it first looks."""
    worlds, told = group(2), list[str]()

    def rare(first: int) -> Callable[[int], Any]:
        counts = [first] * 9

        def made(number: int) -> Any:
            counts[number] += 1
            return torch.full((4,), -1.0 if counts[number] % 100 == 0 else float(number))

        return made

    loaders = [numbered(Numbered(range(9), rare(first)), num_workers) for first in (0, 99)]
    try:
        coming = [
            read_alike(loader, world, TRAINING, 0, tell=told.append)
            for loader, world in zip(loaders, worlds, strict=True)
        ]
        for _ in range(3):
            assert len([next(one) for one in coming]) == 2
    finally:
        for loader in loaders:
            loader.close()
    assert [text.partition(":")[0] for text in told] == [
        "sample 0 of the training data differs from one reading to another (item is [-1, -1, -1, ...], then [0, 0, 0, ...])"
    ]


def test_a_process_own_words_beside_larger_samples_are_left_alone() -> None:
    def of(rank: int) -> Callable[[int], Any]:
        return lambda number: (
            torch.full((100,), float(number)),
            f"host{rank}-123-{number}",
            10**15 * (rank + 1) + number,
        )

    worlds = group(2)
    for rank, world in enumerate(worlds):
        assert sizes(numbered(Numbered(range(9), of(rank))), world) == [4, 4, 1]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda flip: lambda number: (torch.arange(900) + number, ("cat", "dog")[(number % 2) ^ flip]),
            "sample 0 is 'dog' here and 'cat' there",
        ),
        (
            lambda rank: lambda number: (number, f"a sentence of its own {rank} {number}"),
            "sample 0 is 'a sentence of its own 1 0' here",
        ),
        (
            lambda rank: lambda number: (torch.arange(900) + number, 5.0 * rank + number),
            "sample 0 is 5.0 here and 0.0 there",
        ),
    ],
)
def test_text_that_is_the_sample_or_a_label_still_counts(make: Any, said: str) -> None:
    worlds = group(2)
    sizes(numbered(Numbered(range(9), make(0))), worlds[0])
    with pytest.raises(InputError, match=said):
        sizes(numbered(Numbered(range(9), make(1))), worlds[1])


def test_a_data_set_that_is_given_again_is_not_looked_at_again() -> None:
    worlds = group(2)
    sets = [Numbered(range(9)) for _ in worlds]
    for _ in range(20):
        for data, world in zip(sets, worlds, strict=True):
            assert sizes(numbered(data), world, which=EVALUATION) == [4, 4, 1]
    assert [len(data.read) for data in sets] == [4 + 20 * 9] * 2
    assert worlds[0].store is not None
    assert worlds[0].store.num_keys() < 20
    # A worker that makes it anew counts as the others do.
    sizes(numbered(sets[0]), worlds[0])
    sizes(numbered(Numbered(range(9))), worlds[1])
    sizes(numbered(Numbered(range(9))), worlds[0])
    with pytest.raises(InputError, match=r"sample 0 is 8.0 here and 0.0 there"):
        sizes(numbered(Numbered(range(9)[::-1])), worlds[1])
    sets[0].numbers = range(8)  # of another length it is another one
    sizes(numbered(sets[0]), worlds[0])
    with pytest.raises(InputError, match="9 samples on rank 1 and 8 on rank 0"):
        sizes(numbered(Numbered(range(9))), worlds[1])
    worlds = group(2)
    sizes(numbered(sets[1]), worlds[0])
    with pytest.raises(InputError, match="8 samples on rank 1 and 9 on rank 0"):
        sizes(numbered(sets[0]), worlds[1])


def test_a_clock_in_a_sample_is_no_matter() -> None:
    told = list[str]()
    clock = iter(range(10**6))
    for world in group(2):
        loader = numbered(Numbered(range(9), lambda number: (torch.full((4,), float(number)), next(clock))))
        assert [data.size for data in read_alike(loader, world, TRAINING, 0, tell=told.append)] == [4, 4, 1]
    assert told == []
