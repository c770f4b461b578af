"""A stream that is not the same on all workers is refused where it is read, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

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


def test_nothing_is_looked_at_without_others_or_in_a_data_set_that_has_numbers() -> None:
    alone = loader_of(Items(range(8)))
    assert [data.contents for data in read_alike(alone, group(1)[0], TRAINING, 0)] == [None, None]
    for world, numbers in zip(group(2), (range(8), range(8, 16)), strict=True):
        assert sizes(loader_of(list(numbers)), world) == [4, 4]
