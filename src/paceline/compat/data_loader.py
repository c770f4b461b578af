"""What a DataLoader does only for itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, get_worker_info


def end_workers(iterator: Iterator[Any]) -> None:
    """End the processes of an iterator with workers now: the garbage collector leaves them while a frame holds it."""
    iterator._shutdown_workers()  # type: ignore[attr-defined]


def show_dataset(dataset: Any) -> None:
    """Set `get_worker_info().dataset` in a DataLoader process to this one, which it reads through a wrapper."""
    object.__setattr__(get_worker_info(), "dataset", dataset)  # torch lets nobody assign it


def watch_index_sampler(watch: Callable[[Any, Any], Any]) -> None:
    """Make every DataLoader draw its indices from what `watch(loader, its own sampler)` returns."""
    sampler = DataLoader._index_sampler.fget  # type: ignore[attr-defined]
    DataLoader._index_sampler = property(lambda loader: watch(loader, sampler(loader)))  # type: ignore[method-assign,assignment]
