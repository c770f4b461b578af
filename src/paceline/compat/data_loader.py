"""What a DataLoader does only for itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, get_worker_info


def end_workers(iterator: Iterator[Any]) -> None:
    """End the processes of an iterator with workers now: the garbage collector leaves them while a frame holds it."""
    iterator._shutdown_workers()  # type: ignore[attr-defined]


def show_dataset(dataset: Any) -> None:
    """Have `get_worker_info().dataset` be this one in a loading process, which reads it by way of another."""
    object.__setattr__(get_worker_info(), "dataset", dataset)  # torch lets nobody assign it


def watch_index_sampler(watch: Callable[[Any, Any], Any]) -> None:
    """Have every DataLoader draw its indices from what `watch` returns for the loader and its own sampler."""
    sampler = DataLoader._index_sampler.fget  # type: ignore[attr-defined]
    DataLoader._index_sampler = property(lambda loader: watch(loader, sampler(loader)))  # type: ignore[method-assign,assignment]
