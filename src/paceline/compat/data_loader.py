"""What a DataLoader does only for itself."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from typing import Any

from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data.dataloader import _BaseDataLoaderIter


def end_workers(iterator: Iterator[Any]) -> None:
    """End the processes of an iterator with workers now: the garbage collector leaves them while a frame holds it."""
    iterator._shutdown_workers()  # type: ignore[attr-defined]


def lost_workers(iterator: Iterator[Any], patience_s: float) -> list[tuple[int, int, int]]:
    """Return number, process id and exit status (or minus a signal) of processes that have ended or do within some seconds."""
    workers = iterator._workers  # type: ignore[attr-defined]
    try:
        found = _ended(workers, patience_s)
    except RuntimeError:  # torch's handler of SIGCHLD tells of the same end, wherever that finds us
        found = _ended(workers, patience_s)
    for place, *_ in found:
        with suppress(RuntimeError):
            workers[place].join()  # else torch's handler would tell of it with the end of any other process
    return found


def _ended(workers: list[Any], patience_s: float) -> list[tuple[int, int, int]]:
    ready = set(wait([one.sentinel for one in workers], patience_s))
    # A sentinel is closed a moment before its process is gone.
    found = [
        (place, one.pid, _status(one, until_end=one.sentinel in ready)) for place, one in enumerate(workers)
    ]
    return [(place, pid, status) for place, pid, status in found if status is not None]


def _status(worker: Any, *, until_end: bool) -> int | None:
    """Return how a process ended, and leave it to be asked again: an exception between a wait and its answer would lose that."""
    try:
        ended = os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT | (0 if until_end else os.WNOHANG))
    except ChildProcessError:  # multiprocessing has asked already
        known: int | None = worker.exitcode
        return known
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def show_dataset(dataset: Any) -> None:
    """Set `get_worker_info().dataset` in a DataLoader process to this one, which it reads through a wrapper."""
    object.__setattr__(get_worker_info(), "dataset", dataset)  # torch lets nobody assign it


def watch_index_sampler(watch: Callable[[Any, Any], Any]) -> None:
    """Make every DataLoader draw its indices from what `watch(loader, its own sampler)` returns."""
    sampler = DataLoader._index_sampler.fget  # type: ignore[attr-defined]
    DataLoader._index_sampler = property(lambda loader: watch(loader, sampler(loader)))  # type: ignore[method-assign,assignment]


def is_iterator(one: Any) -> bool:
    """Return whether something is what a DataLoader made to be iterated over."""
    return isinstance(one, _BaseDataLoaderIter)


@contextmanager
def watch_iterators(begun: Callable[[Any], None], advanced: Callable[[Any], None]) -> Iterator[None]:
    """Show each iterator that a DataLoader hands out meanwhile to `begun`, and to `advanced` before it gives a batch."""
    _watch_iterators()
    watch = (begun, advanced)
    _watches.append(watch)
    try:
        yield
    finally:
        _watches.remove(watch)


_watches: list[tuple[Callable[[Any], None], Callable[[Any], None]]] = []
"""Those who watch; one that began later may end before another."""


@functools.cache
def _watch_iterators() -> None:
    """Have the methods show what they do, once and for good: another library may put its own around these."""
    iterate, take = DataLoader.__iter__, _BaseDataLoaderIter.__next__

    @functools.wraps(iterate)
    def begin(loader: Any) -> Any:
        iterator = iterate(loader)
        for begun, _ in [*_watches]:
            begun(iterator)
        return iterator

    @functools.wraps(take)
    def advance(iterator: Any) -> Any:
        for _, advanced in [*_watches]:
            advanced(iterator)
        return take(iterator)

    DataLoader.__iter__, _BaseDataLoaderIter.__next__ = begin, advance  # type: ignore[method-assign,assignment]
