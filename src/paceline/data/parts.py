"""A source of parts, files for instance: each worker reads only those of its shards.

The samples of all parts, in the order of the epoch's parts, are one row, and each shard has a stretch of it: as many samples as
it gives to all steps of the epoch. So all shards end in the same step, each sample is used once, and a part is opened by the
shard that it belongs to, or by two where a stretch ends inside it. That takes the number of samples of each part. Where it is not
known, the length of an epoch is said instead; each shard then has parts of its own and goes through them again and again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from itertools import count, islice
from typing import Any

import numpy as np
from torch.utils.data import default_collate

from paceline.data.contents import PARTS
from paceline.data.epochs import epoch_setters, tell_epoch
from paceline.data.generators import GeneratorsAside, seed_generators
from paceline.data.loading import LoadingOptions, StreamProcess
from paceline.data.permutation import EpochPermutation
from paceline.data.reading import Collate
from paceline.data.shards import batch_bounds, shard_bounds, steps_per_epoch
from paceline.data.step_data import ShardData, StepData, split_micro_batches
from paceline.errors import InputError
from paceline.ranges import COUNT
from paceline.world.seeds import derive

Place = tuple[int, int, int]
"""A pass over the parts, the number of a part, and how many of its samples come before."""


class Parts:
    """Sources, and how each is opened: `open(source)` returns what its samples are iterated over.

    `lengths` says how many samples each has, or counts them; then each is used once an epoch. Without it, an epoch has
    `samples_per_epoch`. `shuffle` mixes the parts anew in each epoch, and `buffer` so many samples at once in each shard.
    """

    def __init__(
        self,
        sources: Iterable[Any],
        open: Callable[[Any], Iterable[Any]],  # noqa: A002 - what it does
        *,
        lengths: Sequence[int] | Callable[[Any], int] | None = None,
        samples_per_epoch: int | None = None,
        shuffle: bool = True,
        buffer: int = 1,
    ) -> None:
        self.sources, self.open = list(sources), open
        self.shuffle, self.buffer = shuffle, COUNT.read("buffer", buffer)
        if not self.sources:
            raise InputError("there are no parts: the list of sources is empty. Give at least one.")
        if (lengths is None) == (samples_per_epoch is None):
            raise InputError(
                f"{len(self.sources)} parts need either lengths, the number of samples in each, so that every sample is used "
                "once an epoch; or samples_per_epoch, and each shard goes through its parts again and again."
            )
        self.lengths: list[int] | None = None
        if lengths is not None:
            counted = map(lengths, self.sources) if callable(lengths) else lengths
            self.lengths = [int(one) for one in counted]
            if len(self.lengths) != len(self.sources) or min(self.lengths) < 0 or not sum(self.lengths):
                raise InputError(
                    f"lengths are {len(self.lengths)} numbers, together {sum(self.lengths)}, for {len(self.sources)} parts: give "
                    "each the number of its samples, of which there is one at least."
                )
        self.samples = (
            sum(self.lengths)
            if self.lengths is not None
            else COUNT.read("samples_per_epoch", samples_per_epoch)
        )
        self.dataset: Any = None
        """The data set that the parts belong to, which is told the epoch."""

    @classmethod
    def of(cls, dataset: Any, **options: Any) -> Parts:
        """Return the parts of a data set with `num_shards` and `shard(num_shards, index)`, as Hugging Face's streams have."""
        parts = getattr(dataset, "num_shards", None) or getattr(dataset, "n_shards", None)
        if not isinstance(parts, int) or not callable(getattr(dataset, "shard", None)):
            raise InputError(
                f"a {type(dataset).__name__} has no parts: neither num_shards nor shard(num_shards, index). Give it as it is."
            )
        made = cls(range(parts), partial(_shard_of, dataset, parts), **options)
        made.dataset = dataset
        return made


class InOrder:
    """The samples of all parts once, in the order of the sources: a stream, which every worker reads whole."""

    def __init__(self, parts: Parts) -> None:
        self.dataset = parts

    def __iter__(self) -> Iterator[Any]:
        for source in self.dataset.sources:
            opened = self.dataset.open(source)
            tell_epoch(epoch_setters(opened), 0, anew=True)
            yield from opened


def in_order(data: Any) -> Any:
    """Return what gives the samples of a data set in their order: of `Parts` no shards may have some each."""
    return InOrder(data) if isinstance(data, Parts) else data


class PartsStream:
    """The steps of the owned shards of a source of parts, read in this process."""

    def __init__(
        self,
        parts: Parts,
        *,
        batch_size: int,
        shards: int,
        seed: int,
        owned: range,
        micro_batch: int | None,
        collate: Collate | None,
    ) -> None:
        self._parts, self._batch_size, self._seed = parts, batch_size, seed
        self._shards, self._micro_batch, self._collate = shards, micro_batch, collate
        self.owned = owned
        self.steps_per_epoch = steps_per_epoch(parts.samples, batch_size)
        self._aside = GeneratorsAside()
        self.notes_contents = self.tells_beginning = False
        if parts.lengths is None and len(parts.sources) < shards:
            raise InputError(
                f"{len(parts.sources)} parts of unknown lengths cannot be dealt to {shards} shards. Give their lengths, or use "
                f"--shards {len(parts.sources)} or fewer."
            )

    def steps(self, epoch: int, start_step: int) -> Generator[StepData]:
        """Yield the steps of an epoch from `start_step` on."""
        yield from self.joined(epoch, start_step, [self.shares(epoch, start_step, self.owned)])

    def joined(
        self, epoch: int, start_step: int, groups: list[Iterator[list[ShardData]]]
    ) -> Generator[StepData]:
        """Yield the steps that the shares of some groups of shards make up."""
        said = self._contents()
        for step in range(start_step, self.steps_per_epoch):
            low, high = batch_bounds(step, self._batch_size, self._parts.samples)
            shares = tuple(share for group in groups for share in next(group))
            first = step == start_step
            contents = said if first and self.notes_contents else None
            yield StepData(epoch, step, high - low, shares, contents, said if first else None)
        if start_step >= self.steps_per_epoch and self.tells_beginning:
            yield StepData(epoch, start_step, 0, (), None, said)

    def shares(self, epoch: int, start_step: int, shards: range) -> Iterator[list[ShardData]]:
        """Yield what some shards give to each step."""
        tell_epoch(epoch_setters(self._parts), epoch, anew=True)
        rows = [self._items(epoch, shard, start_step) for shard in shards]
        for step in range(start_step, self.steps_per_epoch):
            low, high = batch_bounds(step, self._batch_size, self._parts.samples)
            with self._aside:
                share = [
                    self._shard_data(epoch, step, shard, high - low, row)
                    for shard, row in zip(shards, rows, strict=True)
                ]
                if step == self.steps_per_epoch - 1 and self._parts.lengths is not None:
                    for row in rows:
                        next(row, None)  # so that a part which goes on behind its length is noticed
            yield share

    def own(self, owned: range) -> None:
        """Carry other shards from the next `steps` on."""
        self.owned = owned

    def close(self) -> None:
        """Nothing to end."""

    def _shard_data(self, epoch: int, step: int, shard: int, size: int, row: Iterator[Any]) -> ShardData:
        low, high = shard_bounds(shard, self._shards, size)
        items = list(islice(row, high - low))
        positions = np.arange(low, high, dtype=np.int64) + step * self._batch_size
        batches = []
        for piece in split_micro_batches(np.arange(high - low, dtype=np.int64), self._micro_batch):
            chosen = [items[place] for place in piece.tolist()]
            if self._collate is None:
                batches.append(default_collate(chosen))
            else:
                seed_generators(derive(self._seed, "collate", epoch, int(positions[piece[0]])))
                batches.append(self._collate(chosen))
        return ShardData(shard, positions, batches)

    def _items(self, epoch: int, shard: int, start_step: int) -> Iterator[Any]:
        """Yield the samples of a shard from a step on, shuffled by blocks of `buffer`."""
        buffer = self._parts.buffer
        given = self._given(shard, start_step)
        first = given - given % buffer
        items = self._row(epoch, shard, first)
        if buffer == 1:
            yield from items
            return
        for block in count(first // buffer):
            held = list(islice(items, buffer))
            if not held:
                return
            order = EpochPermutation(len(held), derive(self._seed, "block", shard, block))
            skipped = max(0, given - block * buffer)
            for place in order.indices(epoch, 0, len(held)).tolist()[skipped:]:
                yield held[place]

    def _given(self, shard: int, steps: int) -> int:
        """Return how many samples a shard gives to the first steps of an epoch."""
        whole, rest = divmod(self._parts.samples, self._batch_size)
        low, high = shard_bounds(shard, self._shards, self._batch_size)
        if steps <= whole:
            return (high - low) * steps
        last_low, last_high = shard_bounds(shard, self._shards, rest)
        return (high - low) * whole + last_high - last_low

    def _row(self, epoch: int, shard: int, skipped: int) -> Iterator[Any]:
        """Yield the samples of a shard in the order of its parts, from one on."""
        lengths = self._parts.lengths
        if lengths is None:
            yield from islice(self._passes(epoch, shard), skipped, None)
            return
        start = sum(self._given(before, self.steps_per_epoch) for before in range(shard))
        stop, start = start + self._given(shard, self.steps_per_epoch), start + skipped
        begin = 0
        for part in self._order(epoch, 0):
            end = begin + lengths[part]
            if begin < stop and start < end:
                place = (0, part, max(start - begin, 0))
                yield from self._whole(epoch, place, min(stop, end) - begin, lengths[part])
            begin = end

    def _passes(self, epoch: int, shard: int) -> Iterator[Any]:
        for number in count():
            empty = True
            for part in self._order(epoch, number)[shard :: self._shards]:
                for item in self._read(epoch, (number, part, 0)):
                    empty = False
                    yield item
            if empty:
                raise InputError(
                    f"the parts of shard {shard} gave no sample in epoch {epoch}. Give each part samples."
                )

    def _order(self, epoch: int, number: int) -> list[int]:
        parts = len(self._parts.sources)
        order = EpochPermutation(parts, derive(self._seed, "parts", number), self._parts.shuffle)
        places: list[int] = order.indices(epoch, 0, parts).tolist()
        return places

    def _whole(self, epoch: int, place: Place, stop: int, length: int) -> Iterator[Any]:
        """Yield samples of a part up to one; raise where it has another number of them than was said."""
        found = place[2]
        items = self._read(epoch, place)
        for item in islice(items, stop - found):
            found += 1
            yield item
        if found < stop or (stop == length and next(items, _END) is not _END):
            raise InputError(
                f"part {self._parts.sources[place[1]]!r} has {'fewer' if found < stop else 'more'} samples than the {length} "
                "that lengths say, so some would be lost or the batches be others. Count them anew."
            )

    def _read(self, epoch: int, place: Place) -> Iterator[Any]:
        """Yield the samples of a part; what it draws for each is a function of (seed, epoch, part, its number there)."""
        number, part, first = place
        source = self._parts.sources[part]

        def seed(at: int) -> None:
            seed_generators(derive(self._seed, "part", epoch, number, part, at))

        try:
            seed(0)
            opened = self._parts.open(source)
            tell_epoch(epoch_setters(opened), epoch, anew=True)
            items = iter(opened)
            for at in count(1):
                seed(at)
                item = next(items, _END)
                if item is _END:
                    return
                if at > first:
                    yield item
        except Exception as error:
            error.add_note(f"while reading part {source!r}, in epoch {epoch}")
            raise

    def _contents(self) -> str:
        """Return what the workers compare: the names of the parts, without their folders, and the lengths."""
        parts = self._parts
        names = [_name(source) for source in parts.sources]
        made = blake2b("\0".join(names).encode(), digest_size=8)
        made.update(json.dumps([parts.lengths, parts.samples, parts.shuffle, parts.buffer]).encode())
        shown = f"{len(names)} from {names[0]} to {names[-1]} with {parts.samples} samples"
        return json.dumps({PARTS: [made.hexdigest(), len(names), True, shown]})


class LoadedParts:
    """The same, read ahead by processes, each of which reads some of the shards."""

    def __init__(self, stream: PartsStream, options: LoadingOptions, processes: int) -> None:
        self._stream = stream
        self._processes = [StreamProcess(replace(options, first=number)) for number in range(processes)]

    def steps(self, epoch: int, start_step: int) -> Generator[StepData]:
        """Yield the steps of an epoch from `start_step` on."""
        owned = self._stream.owned
        used = self._processes[: len(owned)]
        groups = []
        for number, process in enumerate(used):
            low, high = shard_bounds(number, len(used), len(owned))
            read = partial(self._stream.shares, epoch, start_step, owned[low:high])
            groups.append(process.load(read))
        yield from self._stream.joined(epoch, start_step, groups)

    def own(self, owned: range) -> None:
        """Carry other shards from the next `steps` on."""
        self._stream.own(owned)

    def close(self) -> None:
        """End the loading processes."""
        for process in self._processes:
            process.close()


_END = object()


def _shard_of(dataset: Any, parts: int, index: int) -> Iterable[Any]:
    part: Iterable[Any] = dataset.shard(num_shards=parts, index=index)
    return part


def _name(source: Any) -> str:
    if isinstance(source, tuple):
        return ",".join(map(_name, source))
    if isinstance(source, str | int) or hasattr(source, "__fspath__"):
        return str(source).rsplit("/", 1)[-1]
    return type(source).__name__
