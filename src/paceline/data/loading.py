"""Loading processes: torch's DataLoader, fed with the micro-batches that this worker needs."""

from __future__ import annotations

import gc
import os
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import synchronize
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from paceline.compat.data_loader import end_workers, lost_workers, show_dataset
from paceline.compat.parent_death import die_with_parent
from paceline.data.failures import LoaderFailure
from paceline.data.permutation import Indices
from paceline.data.reading import Reader
from paceline.errors import InputError, LoadingProcessError

GOING_S = 1.0
"""How long a process may take to be gone after its sockets are."""
WorkerInit = Callable[[int], None]
MicroBatch = tuple[int, Indices]
"""An epoch, and the samples of one micro-batch."""


@dataclass(frozen=True, slots=True)
class LoadingOptions:
    """How loading processes are run."""

    dataset: Any
    """The user's own, which `worker_init_fn` asks torch for."""
    workers: int
    worker_init_fn: WorkerInit | None
    prefetch: int
    """Micro-batches (steps, for a stream) that each loading process prepares ahead."""
    pin_memory: bool
    persistent: bool = False
    """Whether they stay between epochs, and with them the data set as it was when they began."""
    first: int = 0
    """The number of the first of them, where a worker has them in several groups."""


class LoadingProcesses:
    """Processes that read micro-batches ahead, in the order asked for.

    Each epoch has new ones, which see what was done to the data set before it, unless they are asked to be persistent.
    """

    def __init__(self, reader: Reader, options: LoadingOptions) -> None:
        self._sampler = _Sampler()
        self._persistent = options.persistent
        self._loader = _loader(
            _MicroBatches(reader), options, sampler=self._sampler, persistent=options.persistent
        )
        self._iterator: Iterator[Any] | None = None

    def load(self, micro_batches: Iterable[MicroBatch]) -> Iterator[Any]:
        """Yield the batches of the given micro-batches; an earlier `load` that was left early is abandoned."""
        if not self._persistent:
            self.close()
        self._sampler.upcoming = micro_batches
        with _starting():
            self._iterator = iter(self._loader)
        yield from _unpacked(self._iterator)

    def close(self) -> None:
        """End the processes."""
        _shut_down(self._iterator)
        self._iterator = None


class StreamProcess:
    """One process that reads a stream ahead; each epoch has a new one, which starts the stream anew."""

    def __init__(self, options: LoadingOptions) -> None:
        self._options = options
        self._iterator: Iterator[Any] | None = None

    def load(self, items: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Yield from `items()`, called and run in the loading process."""
        self.close()
        loader = _loader(_RemoteIterable(items), self._options, sampler=None, persistent=False)
        with _starting():
            self._iterator = iter(loader)
        yield from _unpacked(self._iterator)

    def close(self) -> None:
        """End the process."""
        _shut_down(self._iterator)
        self._iterator = None


@contextmanager
def _starting() -> Iterator[None]:
    """Have processes that are forked meanwhile take down nothing that is garbage in this one; say where their locks have no room.

    The communicators of a group that is no more wait for their threads when they are taken down, and a forked process has none.
    """
    gc.freeze()
    try:
        yield
    except OSError as error:
        if [*traceback.walk_tb(error.__traceback__)][-1][0].f_code.co_filename != synchronize.__file__:
            raise
        raise InputError(
            f"loading processes (--num-workers) cannot be started: their locks lie in /dev/shm ({error.strerror}). Enlarge it: "
            "mount -o remount,size=4g /dev/shm, or --shm-size=4g for a container; paceline doctor looks at it. Or leave "
            "--num-workers out."
        ) from error
    finally:
        gc.unfreeze()


class _Sampler:
    """The sampler of the DataLoader: the micro-batches of whichever epoch is being read."""

    def __init__(self) -> None:
        self.upcoming: Iterable[MicroBatch] = ()

    def __iter__(self) -> Iterator[MicroBatch]:
        return iter(self.upcoming)


class _MicroBatches(Dataset[Any]):
    """Reads one micro-batch in the loading process."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def __getitem__(self, wanted: MicroBatch) -> Any:
        epoch, samples = wanted
        try:
            return self._reader.read(epoch, [samples])[0]
        except Exception as error:  # noqa: BLE001 - it is raised in the training process
            return LoaderFailure.of(error)


class _RemoteIterable(IterableDataset[Any]):
    """Runs an iterator in the loading process."""

    def __init__(self, items: Callable[[], Iterator[Any]]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self._items()
        except Exception as error:  # noqa: BLE001 - it is raised in the training process
            yield LoaderFailure.of(error)


@dataclass(frozen=True, slots=True)
class _Start:
    """What a loading process does first."""

    dataset: Any
    worker_init_fn: WorkerInit | None
    first: int
    parent: int

    def __call__(self, number: int) -> None:
        die_with_parent(self.parent)
        show_dataset(self.dataset)
        if self.worker_init_fn is not None:
            self.worker_init_fn(self.first + number)


def _loader(
    dataset: Dataset[Any], options: LoadingOptions, *, sampler: Iterable[MicroBatch] | None, persistent: bool
) -> DataLoader[Any]:
    return DataLoader(
        dataset,
        batch_size=None,
        sampler=sampler,
        num_workers=options.workers,
        collate_fn=_as_it_is,
        pin_memory=options.pin_memory,
        # Not the platform's default: a loading process must be this one's own child to die with it.
        multiprocessing_context="fork" if options.workers else None,
        worker_init_fn=_Start(options.dataset, options.worker_init_fn, options.first, os.getpid()),
        prefetch_factor=options.prefetch,
        persistent_workers=persistent,
        # Its own generator: without one the DataLoader draws a seed from the training process's.
        generator=torch.Generator().manual_seed(0),
    )


def _as_it_is(batch: Any) -> Any:
    return batch


def _unpacked(results: Iterator[Any]) -> Iterator[Any]:
    while True:
        try:
            result = next(results)
        except StopIteration:
            return
        except (
            RuntimeError,
            EOFError,
            OSError,
        ) as error:  # of the queue itself: the data set's own come as a Failure
            lost = lost_workers(results, GOING_S)
            if not lost:
                raise
            raise LoadingProcessError(_how_lost(*lost[0])) from error
        if isinstance(result, LoaderFailure):
            raise result.unpack()
        yield result


def _how_lost(number: int, pid: int, status: int) -> str:
    who = f"its loading process {number} (pid {pid})"
    if status >= 0:
        return f"{who} exited with status {status}"
    name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
    return f"{who} was killed by {name}"


def _shut_down(iterator: Iterator[Any] | None) -> None:
    """End the processes now: the garbage collector would leave them while any frame holds the iterator."""
    if iterator is not None:
        end_workers(iterator)
