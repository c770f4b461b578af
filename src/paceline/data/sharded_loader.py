"""What one worker reads: its shards of every global batch, from any step on, in any way of loading."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any, Protocol

import torch

from paceline.data.device import pinned
from paceline.data.epochs import epoch_setters
from paceline.data.loaders import check_dataset
from paceline.data.loading import LoadingOptions, WorkerInit
from paceline.data.map_style import LoadedMapStyle, MapStyle, Schedule
from paceline.data.permutation import EpochPermutation
from paceline.data.reading import Collate, reader_of
from paceline.data.shards import steps_per_epoch
from paceline.data.step_data import StepData
from paceline.data.stream import LoadedStream, Stream, is_stream
from paceline.errors import InputError
from paceline.ranges import COUNT, LOADERS, SHARDS


class _Source(Protocol):
    """A way of reading: map-style or stream, in this process or in others."""

    def own(self, owned: range) -> None: ...

    def steps(self, epoch: int, start_step: int) -> Generator[StepData]: ...

    def close(self) -> None: ...


class ShardedLoader:
    """One worker's share of a data set: map-style (`__getitem__` and `__len__`) or a stream (`__iter__`).

    What is read is a function of the data set, the seed, the batch size and the shards; never of the number
    of workers, nor of how loading is done. One epoch is read at a time: a new one ends the earlier.

    With `num_workers` a map-style data set is read by that many processes, which stay between epochs;
    a stream by one process, because its items come one after the other. Each prepares `prefetch`
    micro-batches (steps, for a stream) ahead. `shuffle` does not apply to a stream.
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
        micro_batch: int | None = None,
        collate: Collate | None = None,
        num_workers: int = 0,
        worker_init_fn: WorkerInit | None = None,
        pin_memory: bool = False,
        prefetch: int = 2,
    ) -> None:
        check_dataset(dataset)
        batch_size, shards = COUNT.read("batch_size", batch_size), SHARDS.read("shards", shards)
        _check_cut(batch_size, shards, owned)
        if micro_batch is not None:
            micro_batch = COUNT.read("micro_batch", micro_batch)
        COUNT.read("prefetch", prefetch)
        num_workers = LOADERS.read("num_workers", num_workers)
        # Without an accelerator there is nothing to pin for, and torch would warn.
        self._pin = pin_memory and torch.accelerator.is_available()
        self.batch_size = batch_size
        self._running: Generator[StepData] | None = None
        self._source: _Source
        self._stream: Stream | None = None
        self.is_told_epochs = bool(epoch_setters(dataset))
        """Whether the data set, or one that it is made of, is told which epoch begins."""
        self.readings = 0
        """How many epochs were begun with the shards that this worker carries now."""
        self.samples: int | None
        self.order: EpochPermutation | None = None
        """Where each position of an epoch finds its sample; None for a stream, which has its own."""
        if is_stream(dataset):
            self.samples = _stream_length(dataset)
            self._stream = Stream(
                dataset,
                batch_size=batch_size,
                shards=shards,
                seed=seed,
                owned=owned,
                micro_batch=micro_batch,
                collate=collate,
            )
            options = LoadingOptions(dataset, 1, worker_init_fn, prefetch, pin_memory=False)
            self._source = LoadedStream(self._stream, options) if num_workers else self._stream
        else:
            self.samples = _map_style_length(dataset)
            self.order = EpochPermutation(self.samples, seed, shuffle)
            schedule = Schedule(
                self.order, batch_size=batch_size, shards=shards, owned=owned, micro_batch=micro_batch
            )
            reader = reader_of(dataset, seed=seed, collate=collate)
            options = LoadingOptions(dataset, num_workers, worker_init_fn, prefetch, self._pin)
            self._source = (
                LoadedMapStyle(schedule, reader, options) if num_workers else MapStyle(schedule, reader)
            )
        self.steps_per_epoch = None if self.samples is None else steps_per_epoch(self.samples, batch_size)

    def epoch(
        self, epoch: int, start_step: int = 0, *, contents: bool = False, beginning: bool = False
    ) -> Iterator[StepData]:
        """Yield the steps of an epoch from `start_step` on; with the `contents` of a stream, for workers to compare.

        With the `beginning` of a stream's epoch, also where no step of it is left: as one step of no items.
        """
        self._stop_running()
        self.readings += 1
        if self._stream is not None:
            self._stream.notes_contents, self._stream.tells_beginning = contents, beginning
        self._running = self._source.steps(epoch, start_step)
        return map(pinned, self._running) if self._pin else self._running

    def beginning_of(self, epoch: int) -> str | None:
        """Return what a stream's epoch begins with, read once more; the reading that it ends is to be begun again."""
        if self._running is not None:
            self.readings -= 1
        self._stop_running()
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
