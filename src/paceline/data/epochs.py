"""Telling a data set which epoch begins: those with a method `set_epoch` draw another order, or other augmentation, by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SetEpoch = Callable[[int], Any]
_TOLD = "_paceline_epoch"


def epoch_setters(dataset: Any) -> list[tuple[Any, SetEpoch]]:
    """Return the `set_epoch` of a data set, or of those it is made of (Subset, ConcatDataset, ChainDataset, StackDataset)."""
    own = getattr(dataset, "set_epoch", None)
    if callable(own):
        return [(dataset, own)]
    inside = getattr(dataset, "datasets", None)
    if inside is None:
        inside = getattr(dataset, "dataset", None)
        inside = () if inside is None else (inside,)
    parts = inside.values() if isinstance(inside, dict) else inside
    if not isinstance(inside, dict | list | tuple):
        return []
    return [setter for part in parts if part is not dataset for setter in epoch_setters(part)]


def tell_epoch(setters: list[tuple[Any, SetEpoch]], epoch: int, *, anew: bool = False) -> None:
    """Call each `set_epoch` in this process unless its last call had this epoch; evaluation may have set another.

    Where an epoch is begun `anew` it is told all the same: a stream may make its generator when it is.
    """
    for dataset, set_epoch in setters:
        if anew or getattr(dataset, _TOLD, None) != epoch:
            set_epoch(epoch)
            try:
                setattr(dataset, _TOLD, epoch)
            except (AttributeError, TypeError):
                continue  # it has slots: it is told each time
