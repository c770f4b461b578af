"""What a DataLoader does only for itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from typing import Any

from torch.utils.data import DataLoader, get_worker_info


def end_workers(iterator: Iterator[Any]) -> None:
    """End the processes of an iterator with workers now: the garbage collector leaves them while a frame holds it."""
    iterator._shutdown_workers()  # type: ignore[attr-defined]


def lost_workers(iterator: Iterator[Any], patience_s: float) -> list[tuple[int, int, int]]:
    """Return number, process id and exit status (or minus a signal) of processes that have ended or do within some seconds."""
    workers = iterator._workers  # type: ignore[attr-defined]
    try:
        return _ended(workers, patience_s)
    except RuntimeError:  # torch's handler of SIGCHLD tells of the same end, once, wherever that finds us
        return _ended(workers, patience_s)


def _ended(workers: list[Any], patience_s: float) -> list[tuple[int, int, int]]:
    for sentinel in wait([one.sentinel for one in workers], patience_s):
        # It is closed a moment before the process is gone.
        next(one for one in workers if one.sentinel == sentinel).join()
    return [(place, one.pid, one.exitcode) for place, one in enumerate(workers) if one.exitcode is not None]


def show_dataset(dataset: Any) -> None:
    """Set `get_worker_info().dataset` in a DataLoader process to this one, which it reads through a wrapper."""
    object.__setattr__(get_worker_info(), "dataset", dataset)  # torch lets nobody assign it


def watch_index_sampler(watch: Callable[[Any, Any], Any]) -> None:
    """Make every DataLoader draw its indices from what `watch(loader, its own sampler)` returns."""
    sampler = DataLoader._index_sampler.fget  # type: ignore[attr-defined]
    DataLoader._index_sampler = property(lambda loader: watch(loader, sampler(loader)))  # type: ignore[method-assign,assignment]
