"""What a DataLoader does only for itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader


def end_workers(iterator: Iterator[Any]) -> None:
    """End the processes of an iterator with workers now: the garbage collector leaves them while a frame holds it."""
    iterator._shutdown_workers()  # type: ignore[attr-defined]


def watch_index_sampler(watch: Callable[[Any, Any], Any]) -> None:
    """Have every DataLoader draw its indices from what `watch` returns for the loader and its own sampler."""
    sampler = DataLoader._index_sampler.fget  # type: ignore[attr-defined]
    DataLoader._index_sampler = property(lambda loader: watch(loader, sampler(loader)))  # type: ignore[method-assign,assignment]
