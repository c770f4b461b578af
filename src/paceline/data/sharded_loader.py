"""What one worker reads: its shards of every global batch, from any step on, in any way of loading."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from itertools import count
from typing import Any, Protocol, TypeVar

import torch

from paceline.data.device import pinned
from paceline.data.epochs import epoch_setters
from paceline.data.glance import Glance
from paceline.data.loaders import TakenOver, check_dataset
from paceline.data.loading import LoadingOptions, StreamProcess, WorkerInit
from paceline.data.map_style import LoadedMapStyle, MapStyle, Schedule
from paceline.data.ordered import OrderedSchedule
from paceline.data.orders import Order
from paceline.data.parts import LoadedParts, Parts, PartsStream
from paceline.data.permutation import EpochPermutation
from paceline.data.reading import Collate, SampleReader, reader_of
from paceline.data.repeats import repeated
from paceline.data.resident import ResidentReader
from paceline.data.samplers import WholeBatches
from paceline.data.shards import steps_per_epoch
from paceline.data.step_data import StepData
from paceline.data.stream import LoadedStream, Stream, is_stream
from paceline.errors import InputError
from paceline.ranges import COUNT, LOADERS, SHARDS

Value = TypeVar("Value")


class _Source(Protocol):
    """A way of reading: map-style or stream, in this process or in others."""

    def own(self, owned: range) -> None: ...

    def steps(self, epoch: int, start_step: int) -> Generator[StepData]: ...

    def close(self) -> None: ...


class ShardedLoader:
    """One worker's share of a data set: map-style (`__getitem__` and `__len__`) or a stream (`__iter__`).

    What is read is a function of the data set, the seed, the batch size and the shards; never of the number
    of workers, nor of how loading is done. One epoch is read at a time: a new one ends the earlier.

    With `num_workers` a map-style data set is read by that many processes, and `Parts` by that many
    at most; a stream by one process, because its items come one after the other. Each prepares `prefetch`
    micro-batches (steps, for a stream) ahead. Each epoch has new ones, which read the data set as it is then; with
    `persistent_workers` those of a map-style data set stay, and it with them. `shuffle` does not apply to a stream.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        shards: int,
        seed: int,
        owned: range,
        shuffle: bool = True,
        order: Order | None = None,
        micro_batch: int | None = None,
        collate: Collate | None = None,
        num_workers: int = 0,
        worker_init_fn: WorkerInit | None = None,
        persistent_workers: bool = False,
        pin_memory: bool = False,
        prefetch: int = 2,
        device: torch.device | None = None,
        taken_over: TakenOver | None = None,
    ) -> None:
        """`device` is where batches are computed with: they may come from a copy of the data set there.

        An `order` says what an epoch reads, in place of `shuffle`. `taken_over` is the DataLoader that all this is from.
        """
        check_dataset(dataset)
        _check_functions(collate=collate, worker_init_fn=worker_init_fn)
        batch_size, shards = COUNT.read("batch_size", batch_size), SHARDS.read("shards", shards)
        _check_cut(batch_size, shards, owned)
        if micro_batch is not None:
            micro_batch = COUNT.read("micro_batch", micro_batch)
        COUNT.read("prefetch", prefetch)
        num_workers = LOADERS.read("num_workers", num_workers)
        # Without an accelerator there is nothing to pin for, and torch would warn.
        self._pin = pin_memory and torch.accelerator.is_available()
        self.batch_size = batch_size
        self._dataset, self._taken_over = dataset, taken_over
        self._length: int | None = None
        """How many samples a map-style data set has, in every epoch."""
        self._glance: Glance | None = None
        """What looks at a few samples of one; in a loading process, where it is read in some: it may open files on first use."""
        self._glances_in: StreamProcess | None = None
        self._running: Generator[StepData] | None = None
        self._source: _Source
        self._compared: Stream | OrderedSchedule | PartsStream | None = None
        """What other workers may read otherwise, and is compared."""
        self.is_told_epochs = order is not None or bool(epoch_setters(dataset))
        """Whether the data set, or one that it is made of, is told which epoch begins."""
        self.readings = 0
        """How many epochs were begun with the shards that this worker carries now."""
        self.samples: int | None
        self.order: EpochPermutation | None = None
        """Where each position of an epoch finds its sample; None where it has an order of its own, as streams have."""
        self.drops_rest = isinstance(order, WholeBatches)
        """Whether samples that make up no whole batch are left out."""
        self.uneven = order is not None
        """Whether batches in the middle of an epoch may be smaller than the others."""
        cut: dict[str, Any] = {
            "batch_size": batch_size,
            "shards": shards,
            "seed": seed,
            "owned": owned,
            "micro_batch": micro_batch,
        }
        if isinstance(dataset, Parts) or is_stream(dataset):
            if order is not None:
                raise InputError(
                    "a stream is read in its own order, so it takes no other. Give a map-style data set, or leave order out."
                )
            options = LoadingOptions(dataset, 1, worker_init_fn, prefetch, pin_memory=False)
            self._source = self._stream_of(dataset, {**cut, "collate": collate}, options, num_workers)
        else:
            reader = reader_of(dataset, seed=seed, collate=collate, device=None if num_workers else device)
            self._pin &= not isinstance(reader, ResidentReader)
            options = LoadingOptions(
                dataset, num_workers, worker_init_fn, prefetch, self._pin, persistent_workers
            )
            self._glance = Glance(dataset, seed)
            if num_workers:
                self._glances_in = StreamProcess(
                    LoadingOptions(dataset, 1, worker_init_fn, prefetch, pin_memory=False)
                )
            schedule = self._schedule_of(dataset, reader, cut, order, shuffle)
            self._source = (
                LoadedMapStyle(schedule, reader, options) if num_workers else MapStyle(schedule, reader)
            )
        self.repeats = 1
        """How many steps in a row are trained with each batch: an epoch has so many times as many."""

    @property
    def batches_per_epoch(self) -> int | None:
        """How many global batches an epoch has, where that is known before it is read."""
        if isinstance(self._compared, OrderedSchedule):
            return self._compared.steps_per_epoch
        return None if self.samples is None else steps_per_epoch(self.samples, self.batch_size)

    @property
    def steps_per_epoch(self) -> int | None:
        """How many steps of training an epoch takes, where that is known before it is read."""
        batches = self.batches_per_epoch
        return None if batches is None else batches * self.repeats

    @property
    def in_parts(self) -> bool:
        """Whether each worker reads parts of its own."""
        return isinstance(self._compared, PartsStream)

    def _stream_of(
        self, dataset: Any, cut: dict[str, Any], options: LoadingOptions, num_workers: int
    ) -> _Source:
        if isinstance(dataset, Parts):
            self.samples = dataset.samples
            parts = self._compared = PartsStream(dataset, **cut)
            return LoadedParts(parts, options, num_workers) if num_workers else parts
        self.samples = _stream_length(dataset)
        stream = self._compared = Stream(dataset, **cut)
        return LoadedStream(stream, options) if num_workers else stream

    def _schedule_of(
        self, dataset: Any, reader: Any, cut: dict[str, Any], order: Order | None, shuffle: bool
    ) -> Schedule | OrderedSchedule:
        samples = self._length = _map_style_length(dataset)
        if order is None:
            seed = cut.pop("seed")
            self.samples, self.order = samples, EpochPermutation(samples, seed, shuffle)
            return Schedule(self.order, **cut)
        self.samples = None
        places = isinstance(reader, SampleReader)
        made = self._compared = OrderedSchedule(order, samples=samples, with_positions=places, **cut)
        return made

    def disorder(self) -> str | None:
        """Return why what is read is not in the order of the samples; None where it is, or in an order that somebody gave."""
        if isinstance(self._compared, PartsStream):
            return "a loader of Parts, whose samples are dealt to the shards"
        if self._taken_over is not None and self._taken_over.leaves_out:
            return "a sampler"
        return None if self.order is None or not self.order.shuffle else "a loader that shuffles"

    def epoch(
        self,
        epoch: int,
        start_step: int = 0,
        *,
        times: int = 1,
        contents: bool = False,
        beginning: bool = False,
        states: bool = False,
        state: Any = None,
    ) -> Iterator[StepData]:
        """Yield the steps of an epoch from `start_step` on, each batch `times` times in a row.

        With the `contents` of a stream, for workers to compare.
        With the `beginning` of a stream's epoch, also where no step of it is left: as one step of no items. With the `states` of
        a stream behind each step; with such a `state` reading goes on there, and not from the beginning of the epoch. There are
        none, and the epoch is read again, where batches are given several times: states are those of batches, not of steps.
        """
        self._stop_running()
        self._check_unchanged()
        self.readings += 1
        if self._compared is not None:
            self._compared.notes_contents, self._compared.tells_beginning = contents, beginning
        if isinstance(self._compared, Stream):
            goes_on = times == 1
            self._compared.keeps_states, self._compared.state = states and goes_on, state if goes_on else None
        self._running = self._source.steps(epoch, start_step // times)
        if times > 1:
            self._running = repeated(self._running, times, start_step % times)
        return map(pinned, self._running) if self._pin else self._running

    def _check_unchanged(self) -> None:
        """Raise where this epoch would not be read as it is asked for by now."""
        if self._length is not None and (samples := _map_style_length(self._dataset)) != self._length:
            raise InputError(
                f"the data set has {samples} samples now, and had {self._length} when it was opened: an epoch is the same "
                "number of samples each time. Give all of them from the beginning, with an order=(seed, epoch) function that "
                "says which of them an epoch reads."
            )
        if self._taken_over is not None:
            self._taken_over.check()

    @property
    def numbered(self) -> tuple[Any, int] | None:
        """The data set and its length, if its samples have numbers."""
        return None if self._length is None else (self._dataset, self._length)

    def glances(self, epoch: int, look: Callable[[Iterator[str]], Value]) -> tuple[int, Value] | None:
        """Return the length of a map-style data set, and what `look` makes of readings of a few of its samples.

        It is called where the samples are read, which moves no generator of the process. None of a stream.
        """
        if self._glance is None or self._length is None:
            return None
        glance, length = self._glance, self._length

        def read() -> Iterator[Value]:
            yield look(glance.contents(epoch, length) for _ in count())

        if self._glances_in is None:
            return length, next(read())
        try:
            (made,) = self._glances_in.load(read)
        finally:
            self._glances_in.close()
        return length, made

    def beginning_of(self, epoch: int) -> str | None:
        """Return what a stream's epoch begins with, read once more; the reading that it ends is to be begun again."""
        if self._running is not None:
            self.readings -= 1
        self._stop_running()
        if isinstance(self._compared, Stream):
            self._compared.keeps_states, self._compared.state = False, None
        first = self._source.steps(epoch, 0)
        found = next(first, None)
        first.close()
        return None if found is None else found.beginning

    def own(self, owned: range) -> None:
        """Carry other shards from now on; the epoch being read ends here."""
        self._stop_running()
        self.readings = 0
        self._source.own(owned)

    def close(self) -> None:
        """End the epoch being read and every loading process."""
        self._stop_running()
        self._source.close()

    def _stop_running(self) -> None:
        if self._running is not None:
            self._running.close()
            self._running = None


def _check_functions(**given: Any) -> None:
    for name, value in given.items():
        if value is not None and not callable(value):
            raise InputError(f"{name} is {value!r:.60}, but must be a function.")


def _check_cut(batch_size: int, shards: int, owned: range) -> None:
    if batch_size < shards:
        raise InputError(
            f"a batch of {batch_size} samples cannot be cut into {shards} shards: some would be empty. "
            f"Use --batch-size {shards} or more, or --shards {batch_size} or fewer."
        )
    if not owned and owned.start != shards:  # a server's share is nothing, after the last shard
        raise InputError(
            f"this worker carries none of the {shards} shards: there are more workers than shards. "
            f"Use --workers {shards} or fewer, or start the run with more --shards."
        )
    if owned.step != 1 or owned.start < 0 or owned.stop > shards:
        raise InputError(f"{owned} is no run of the shards 0 to {shards - 1}. Take it from owned_shards().")


def _map_style_length(dataset: Any) -> int:
    kind = type(dataset).__name__
    if not hasattr(dataset, "__getitem__"):
        raise InputError(
            f"a {kind} is not a data set: it has neither __getitem__ nor __iter__. "
            "Give a map-style or an iterable data set, such as a TensorDataset."
        )
    try:
        samples = len(dataset)
    except (TypeError, NotImplementedError) as error:
        raise InputError(
            f"the data set {kind} has __getitem__ but no length, so its samples cannot be ordered. "
            "Give it a __len__, or make it an IterableDataset."
        ) from error
    if samples == 0:
        raise InputError(f"the data set is empty: len() of this {kind} is 0. Give one with samples.")
    return samples


def _stream_length(dataset: Any) -> int | None:
    if isinstance(dataset, Iterator):
        raise InputError(
            f"the data set is a {type(dataset).__name__}, which can be read only once. "
            "Give an object whose __iter__ starts from the beginning, such as an IterableDataset."
        )
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None
