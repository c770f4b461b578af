"""Whether all workers read the same data: a stream that splits itself by rank would lose the items that paceline deals elsewhere.

Every worker reads the whole stream, so they compare what they read at the same place of it: items of the first step of a
reading and of the steps 1, 2, 4, 8 and so on of its epoch, and how many there were. That is done in the readings 1, 2, 4, 8 and
so on of a data set by a group. No worker waits for another: the first that comes to a place leaves word of what it has read
there, and the others compare. Of a data set whose samples have numbers each worker reads its own, so a few of them are read
on all workers beside that, in the first reading by a group; not again where the loop gives the same data set anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch.distributed import DistError

from paceline.data import ShardedLoader, StepData
from paceline.data.contents import ORDER, PARTS, compare
from paceline.data.glance import parted, parted_for_good, redrawn
from paceline.errors import InputError
from paceline.world import World
from paceline.world.base import Comm
from paceline.world.words import leave_first, take_back

TRAINING, EVALUATION = "training", "evaluation"
_KEPT = 2
"""Readings whose words stay in the store, which lives as long as the launch."""
_INSTEAD = (
    "Give the whole stream on every worker, without get_rank(), RANK or split_dataset_by_node: paceline deals it out, and would "
    "use a part of each part. What a stream draws from a generator of its own needs the same seed on all workers."
)


@dataclass
class _Readings:
    """How many readings a group has compared, the same on all of its workers, and the words that this one left in the last."""

    number: int = 0
    left: list[tuple[int, str]] = field(default_factory=list)
    _compared: dict[int, tuple[ref[Any], int]] = field(default_factory=dict)
    """Data sets whose samples this worker has compared, by identity, with the length that each had."""

    def has_compared(self, dataset: Any, length: int) -> bool:
        """Return whether the samples of a data set were compared before."""
        known = self._compared.get(id(dataset))
        return known is not None and known[0]() is dataset and known[1] == length

    def note_compared(self, dataset: Any, length: int) -> None:
        """Remember a data set as long as it lives."""
        self._compared = {key: one for key, one in self._compared.items() if one[0]() is not None}
        with suppress(TypeError):  # a list, of which nobody could tell whether it is the same
            self._compared[id(dataset)] = ref(dataset), length


_PURE = (
    "Every worker must find the same: no set that is gone through, no clock, no get_rank() in an order; it is a function of "
    "(seed, epoch). Names of files are best sorted."
)


_SAME = (
    "Every worker must make the same data set: no set that is gone through and no os.listdir that is not sorted (each process of "
    "torchrun has its own PYTHONHASHSEED), no generator without a seed, no get_rank(): paceline deals the samples out."
)


_groups: WeakKeyDictionary[Comm, _Readings] = WeakKeyDictionary()


def read_alike(
    loader: ShardedLoader,
    world: World,
    which: str,
    epoch: int,
    start_step: int = 0,
    state: Any = None,
    *,
    tell: Callable[[str], None] | None = None,
) -> Iterator[StepData]:
    """Yield the steps of an epoch from `start_step` on; raise where this worker reads another stream than the others.

    A training stream with states gives them with its steps, and goes on from the `state` of `start_step` where it is known. What
    the user should know of the data the first worker is to `tell`.
    """
    times = loader.repeats if which == TRAINING else 1  # one of the loop's own is evaluated batch by batch
    key = None
    if loader.readings == 0 and world.size > 1:
        key = _compare_samples(loader, world, which, epoch)
    options = {"times": times, "beginning": start_step > 0, "states": which == TRAINING, "state": state}
    if loader.order is not None or world.size == 1 or (loader.readings + 1).bit_count() > 1:
        steps = loader.epoch(epoch, start_step, **options)
        return (
            steps if key is None or tell is None or not world.is_first else _telling(steps, world, key, tell)
        )
    return _Comparison(loader, world, which, epoch).read(start_step, options)


def _telling(
    steps: Iterator[StepData], world: World, key: str, tell: Callable[[str], None]
) -> Iterator[StepData]:
    """Yield the steps, and tell after the first of them what some worker has found: all have compared when they have taken it."""
    for number, data in enumerate(steps):
        yield data
        if number == 0:
            with suppress(DistError):
                if found := _leave(world, key, ""):
                    tell(found)


def _compare_samples(loader: ShardedLoader, world: World, which: str, epoch: int) -> str | None:
    """Raise where this worker's map-style data set is another than that of the worker that came here first.

    Return the key under which a worker leaves what the first one should tell; None of a stream.
    """
    numbered, comparison = loader.numbered, _Comparison(loader, world, which, epoch)
    if numbered is None:
        return None
    if comparison.group.has_compared(*numbered):
        comparison.begin()  # another worker may have made the data set anew, and all count alike
        return None
    key = _compare_anew(loader, world, which, epoch, comparison)
    comparison.group.note_compared(*numbered)
    return key


def _compare_anew(
    loader: ShardedLoader, world: World, which: str, epoch: int, comparison: _Comparison
) -> str | None:
    found = loader.glances(epoch, next)
    if found is None:
        return None
    length, mine = found
    rank, word = comparison.first_of_all(f"{length} {mine}")
    key = comparison.key("redrawn")
    said, _, theirs = word.partition(" ")
    if said != str(length):
        raise InputError(
            f"the {which} data has {length} samples on rank {world.rank} and {said} on rank {rank}. {_SAME}"
        )
    if theirs == mine or parted(mine, theirs, []) is None:
        return key
    again = loader.glances(epoch, partial(parted_for_good, mine, theirs))
    difference, others = (None, []) if again is None else again[1]
    if difference is not None:
        sample, seen = difference
        raise InputError(
            f"the {which} data gives other samples on rank {world.rank} than on rank {rank}: sample {sample} is "
            f"{seen.here} here and {seen.there} there ({seen.place}). {_SAME}"
        )
    if (drawn := redrawn(mine, others)) is not None:
        sample, seen = drawn
        with suppress(DistError):
            _leave(
                world,
                key,
                f"sample {sample} of the {which} data differs from one reading to another ({seen.place} is {seen.here}, then "
                f"{seen.there}): it draws from a generator of its own, so another number of workers trains on other values, and "
                "so does the same run again. Draw from the generators of torch, numpy or random itself, which paceline seeds.",
            )
    return key


def _leave(world: World, key: str, word: str) -> str:
    """Leave a word that is taken back some readings later; return the one that was there first."""
    group = _groups[world.comm]
    group.left.append((group.number, key))
    return leave_first(world, key, word)


class _Comparison:
    """Compares this worker's pass over a stream with those of the other workers."""

    def __init__(self, loader: ShardedLoader, world: World, which: str, epoch: int) -> None:
        self._loader, self._world, self._which, self._epoch = loader, world, which, epoch
        self.group = _groups.setdefault(world.comm, _Readings())

    def read(self, start_step: int, options: dict[str, Any]) -> Iterator[StepData]:
        """Yield the steps of an epoch from `start_step` on, and compare."""
        self.begin()
        whole = self._loader.batch_size
        times: int = options["times"]
        items, ended = start_step // times * whole, False
        for data in self._loader.epoch(self._epoch, start_step, contents=True, **options):
            if data.contents is not None:
                self._compare_items(data.step // times, data.contents)
            if self._loader.uneven:
                ended = True  # an order is compared as a whole
                yield data
                continue
            items, ended = data.step // times * whole + data.size, data.size < whole
            if ended and data.step % times == times - 1:
                self._compare_ends(items)
            yield data
        if not ended:
            self._compare_ends(items)

    def first_of_all(self, mine: str) -> tuple[int, str]:
        """Return what the first worker that came here said of its data set, and which it is."""
        self.begin()
        return self._first("samples", mine)

    def key(self, place: str) -> str:
        """Return where in the store words of this reading lie."""
        return f"stream/{self.group.number}/{self._which}/{self._epoch}/{place}"

    def begin(self) -> None:
        """Count this reading, and take back words that nobody comes to any more."""
        group = self.group
        group.number += 1
        with suppress(DistError):
            while group.left and group.left[0][0] <= group.number - _KEPT:
                take_back(self._world, group.left.pop(0)[1])

    def _compare_items(self, step: int, mine: str) -> None:
        rank, theirs = self._first(str(step), mine)
        found = None if rank == self._world.rank else compare(mine, theirs)
        if found is None:
            return
        if found.place in (ORDER, PARTS):
            raise InputError(
                f"{found.place} of the {self._which} data in epoch {self._epoch}: {found.here} on rank {self._world.rank}; "
                f"{found.there} on rank {rank}. {_PURE}"
            )
        values = f": {found.here} and {found.there}" if found.here != found.there else ""
        raise InputError(
            f"the {self._which} stream gives other items on rank {self._world.rank} than on rank {rank}, from item "
            f"{step * self._loader.batch_size} of epoch {self._epoch} on ({found.place}{values}). {_INSTEAD}"
        )

    def _compare_ends(self, items: int) -> None:
        rank, theirs = self._first("end", str(items))
        if theirs != str(items):
            raise InputError(
                f"the {self._which} stream ended after {items} items on rank {self._world.rank} and after {theirs} on rank "
                f"{rank}, in epoch {self._epoch}. {_INSTEAD}"
            )

    def _first(self, place: str, word: str) -> tuple[int, str]:
        """Return what the first worker that came to a place said of it, and which it is."""
        group, rank = self.group, self._world.rank
        key = self.key(place)
        with suppress(DistError):  # the group breaks, which is noticed where its workers train together
            said, _, theirs = leave_first(self._world, key, f"{rank} {word}").partition(" ")
            if int(said) == rank:
                group.left.append((group.number, key))
            return int(said), theirs
        return rank, word
