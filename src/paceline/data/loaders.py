"""A DataLoader given where a data set belongs: what it says is taken over exactly, or it is refused by name.

A DataLoader yields batches. Taken for a stream of samples, each of its batches would be one sample, and training would go on
with batches of batches. So nothing that yields batches may reach a `ShardedLoader`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    SubsetRandomSampler,
    default_collate,
)

from paceline.data.loading import WorkerInit
from paceline.data.orders import Order
from paceline.data.reading import Collate
from paceline.data.samplers import Rerun, is_plain, order_of, without_rest
from paceline.data.stream import is_stream
from paceline.errors import InputError

STATEFUL = "StatefulDataLoader"
"""torchdata's: a DataLoader that also knows its position, which here is the run's."""
INSTEAD = "Give the data set itself: run.steps(dataset, batch_size=N), or return it from the Task."


@dataclass(frozen=True, kw_only=True)
class LoaderSettings:
    """What a DataLoader says beside its order: how large the GLOBAL batch is, and how it is read."""

    dataset: Any
    batch_size: int | None
    """None where a batch sampler does not say how large its batches may be."""
    shuffle: bool
    order: Order | None
    collate: Collate | None
    num_workers: int
    worker_init_fn: WorkerInit | None
    persistent_workers: bool


class TakenOver:
    """What a DataLoader said when it was taken over: no epoch may begin after it says something else."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self._said = {name: _kept(value) for name, value in _sayings(loader).items()}
        self.leaves_out = type(_sampler(loader)) is SubsetRandomSampler
        """Whether it chooses some of its data set's samples."""

    def check(self) -> None:
        """Raise where it has changed."""
        for name, value in _sayings(self._loader).items():
            if not _same(value, self._said[name]):
                raise InputError(
                    f"{name} of the {type(self._loader).__name__} has changed since the run has taken it over, which would be "
                    "ignored. Give the data set with an order=(seed, epoch) function, which is asked in each epoch."
                )


def _sampler(loader: DataLoader[Any]) -> Any:
    """Return what gives the samples of a DataLoader, where it cuts them into batches itself."""
    batches: Any = loader.batch_sampler
    return getattr(batches, "sampler", None) if is_plain(batches) else None


def _sayings(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return what of a DataLoader is read once, and might be changed: samplers of somebody's own are gone through each time."""
    batches, sampler = loader.batch_sampler, _sampler(loader)
    said = {"the collate_fn": loader.collate_fn, "the worker_init_fn": loader.worker_init_fn}
    if sampler is not None:
        names = ("weights", "indices", "num_samples", "replacement")
        said |= {f"the sampler's {name}": getattr(sampler, name, None) for name in names}
        said |= {f"the {name}": getattr(batches, name) for name in ("batch_size", "drop_last")}
    return said


def _kept(value: Any) -> Any:
    """Return what a later value is compared with, which nobody else changes."""
    if isinstance(value, Tensor):
        return value.clone()
    return copy.copy(value) if isinstance(value, list | np.ndarray) else value


def _same(value: Any, kept: Any) -> bool:
    if isinstance(value, Tensor):
        return isinstance(kept, Tensor) and torch.equal(value, kept)
    if isinstance(value, np.ndarray):
        return np.array_equal(value, kept)
    return bool(value == kept)


def is_loader(data: Any) -> bool:
    """Return whether this is a DataLoader, torch's or a subclass of it."""
    return isinstance(data, DataLoader)


def drops_rest(loader: DataLoader[Any]) -> bool:
    """Return whether a DataLoader leaves out the samples of a data set that do not make up a last batch."""
    batches: Any = loader.batch_sampler
    if is_stream(loader.dataset) or not is_plain(batches) or not batches.drop_last:
        return False
    return bool(len(batches.sampler) % batches.batch_size)


def settings_of(loader: DataLoader[Any], *, every_sample: bool = False) -> LoaderSettings:
    """Return what a DataLoader says; raise where it asks for batches or an order that would not be kept.

    `every_sample` leaves none out, whatever its `drop_last` says.
    """
    kind = type(loader).__name__
    if type(loader).__iter__ is not DataLoader.__iter__ and kind != STATEFUL:
        raise InputError(f"a {kind} makes its batches in a way of its own, which would be lost. {INSTEAD}")
    batch_size, drop_last, sampler = loader.batch_size, loader.drop_last, loader.sampler
    if batch_size is None:
        batches: Any = loader.batch_sampler
        if batches is None:
            raise InputError(f"the {kind} has batch_size=None, so its items are batches already. {INSTEAD}")
        if not is_plain(batches):
            said = getattr(batches, "batch_size", None)
            size = said if isinstance(said, int) else None
            return _settings(loader, loader.dataset, size, False, Rerun(batches, batches=True))
        batch_size, drop_last, sampler = batches.batch_size, batches.drop_last, batches.sampler
    if is_stream(loader.dataset):
        if drop_last:
            raise InputError(
                f"the {kind} has drop_last=True, but no sample of a stream is dropped here: a short last batch is weighted "
                "exactly. Leave drop_last out."
            )
        return _settings(loader, loader.dataset, batch_size, False, None)
    dataset, shuffle, order = order_of(sampler, loader.dataset)
    if drop_last and not every_sample:
        order = without_rest(dataset, shuffle, order, batch_size)
    return _settings(loader, dataset, batch_size, shuffle, order)


def _settings(
    loader: DataLoader[Any], dataset: Any, batch_size: int | None, shuffle: bool, order: Order | None
) -> LoaderSettings:
    return LoaderSettings(
        dataset=dataset,
        batch_size=batch_size,
        shuffle=shuffle,
        order=order,
        collate=None if loader.collate_fn is default_collate else loader.collate_fn,
        num_workers=loader.num_workers,
        worker_init_fn=loader.worker_init_fn,
        persistent_workers=loader.persistent_workers,
    )


def merged(
    loader: DataLoader[Any], batch_size: int | None, options: Mapping[str, Any], *, every_sample: bool = False
) -> tuple[Any, int, dict[str, Any]]:
    """Return data set, batch size and options of a ShardedLoader, where a DataLoader and the caller say what they should be."""
    said = settings_of(loader, every_sample=every_sample)
    kind = type(loader).__name__
    if said.batch_size is None and batch_size is None:
        raise InputError(
            f"the batch sampler of the {kind} ({type(loader.batch_sampler).__name__}) has no batch_size. Give it one, "
            "or say batch_size=N to run.steps or the Task: the largest of its batches, which are the GLOBAL ones."
        )
    if said.batch_size is not None and batch_size not in (None, said.batch_size):
        raise InputError(
            f"the {kind} has batches of {said.batch_size} samples and the run has batches of {batch_size}; either is the GLOBAL "
            f"batch, of all workers together. Say batch_size={said.batch_size} (--batch-size {said.batch_size}) to the run, or "
            f"batch_size={batch_size} to the {kind}."
        )
    if options.get("order") is not None:
        raise InputError(
            f"an order and a {kind} were given, which has one of its own. Give the data set with the order."
        )
    for name in ("collate", "worker_init_fn"):
        if options.get(name) is not None and getattr(said, name) is not None:
            raise InputError(
                f"the {kind} has a function of its own for {name}, and so has the task. Give one."
            )
    return (
        said.dataset,
        said.batch_size or batch_size or 0,
        {
            **options,
            "order": said.order,
            "shuffle": options.get("shuffle", True) and said.shuffle,
            "collate": options.get("collate") or said.collate,
            "worker_init_fn": options.get("worker_init_fn") or said.worker_init_fn,
            "num_workers": options.get("num_workers") or said.num_workers,
            "persistent_workers": options.get("persistent_workers") or said.persistent_workers,
            "taken_over": TakenOver(loader),
        },
    )


def check_dataset(data: Any) -> None:
    """Raise for what is no data set, although it can be indexed or iterated over."""
    kind = type(data).__name__
    if is_loader(data):
        raise InputError(f"a {kind} gives batches, not samples. {INSTEAD}")
    if isinstance(data, str | bytes | Path):
        raise InputError(f"{str(data)!r:.60} is a {kind}, not a data set. Read it into one first.")
    if isinstance(data, Mapping):
        raise InputError(
            f"a {kind} of {', '.join(map(repr, list(data)[:4]))} is not a data set: its samples have no numbers. Give one of its "
            "members, or a TensorDataset of them."
        )
    if type(data) is tuple and data and all(isinstance(member, Tensor) for member in data):
        raise InputError(
            f"a tuple of {len(data)} tensors would be {len(data)} samples. Give torch.utils.data.TensorDataset(*tensors), or a "
            "list if each tensor is one sample."
        )
    batches = [name for name in ("batch_sampler", "collate_fn", "batch_size") if hasattr(data, name)]
    if batches and hasattr(data, "__iter__") and not isinstance(data, Dataset) and not _has_samples(data):
        raise InputError(f"a {kind} has a {batches[0]}, so what it gives are batches, not samples. {INSTEAD}")


def note_batches(data: Any) -> str | None:
    """Return a line for the user where the members of a list may be batches already; samples that are sequences look the same."""
    if type(data) not in (list, tuple) or not data or not isinstance(data[0], list | tuple | Mapping):
        return None
    first = list(data[0].values() if isinstance(data[0], Mapping) else data[0])
    tensors = [member for member in first if isinstance(member, Tensor)]
    lengths = {len(member) if member.dim() else 0 for member in tensors}
    if len(tensors) < 2 or len(lengths) > 1 or max(lengths) < 2 or max(one.dim() for one in tensors) < 2:
        return None
    shapes = ", ".join(f"Tensor{list(one.shape)}" for one in tensors)
    return (
        f"the data is a list of {len(data)} samples, the first of {shapes}. If that is a batch of {max(lengths)}, give the "
        "samples instead (a TensorDataset, the data set of the DataLoader): batches of batches would be trained."
    )


def _has_samples(data: Any) -> bool:
    return hasattr(data, "__getitem__") and hasattr(data, "__len__")
