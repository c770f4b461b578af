"""torch's samplers as orders: what a sampler of a DataLoader says, with random numbers that any worker draws alike.

A sampler of somebody's own is gone through at the beginning of each epoch on every worker, under a seed made of (seed, epoch). It
is gone through twice before the first, and the workers compare what they found.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Sized
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from paceline.data.generators import GeneratorsAside, seed_generators
from paceline.data.orders import Batches, Computed, Order, Rounds, Weighted
from paceline.errors import InputError
from paceline.world.seeds import derive

TORCHDATA = "torchdata."
"""Its samplers are torch's, and know their position, which here is the run's."""


class Rerun:
    """The order of a sampler, or of a batch sampler, of somebody's own."""

    def __init__(self, sampler: Any, *, batches: bool = False) -> None:
        self._sampler, self._batches = sampler, batches
        if not batches and (samples := _length(sampler)) is not None:
            self.samples_per_epoch = samples
        self._proved = False

    def __call__(self, seed: int, epoch: int) -> Any:
        """Return the samples or batches of an epoch."""
        found = self._gone_through(seed, epoch)
        if not self._proved:
            if found != self._gone_through(seed, epoch):
                raise InputError(
                    f"the {type(self._sampler).__name__} gives another order when it is asked for epoch {epoch} once more, so a "
                    "resumed run would read other samples. It keeps a generator or a position: draw from torch, numpy or "
                    "random in __iter__, which are seeded by (seed, epoch), or give a method set_epoch(epoch)."
                )
            self._proved = True
        return Batches.of(found) if self._batches else found

    def _gone_through(self, seed: int, epoch: int) -> list[Any]:
        key = derive(seed, "sampler", epoch)
        with GeneratorsAside():
            for one in _nested(self._sampler):
                if callable(getattr(one, "set_epoch", None)):
                    one.set_epoch(epoch)
                for kept in vars(one).values() if hasattr(one, "__dict__") else ():
                    if isinstance(kept, torch.Generator):
                        kept.manual_seed(key)
                    elif isinstance(kept, random.Random):
                        kept.seed(key)
            seed_generators(key)
            if self._batches:
                return [[_number(self._sampler, sample) for sample in batch] for batch in self._sampler]
            return [_number(self._sampler, sample) for sample in self._sampler]


class WholeBatches:
    """An order without the rest that does not make up a batch, as `drop_last` asks for."""

    def __init__(self, order: Order, batch_size: int) -> None:
        self._order, self._batch_size = order, batch_size
        if (said := getattr(order, "samples_per_epoch", None)) is not None:
            self.samples_per_epoch = self._whole(said)

    def __call__(self, seed: int, epoch: int) -> Any:
        """Return the samples of an epoch that make up whole batches."""
        samples = self._order(seed, epoch)
        if isinstance(samples, Computed):
            return Computed(self._whole(len(samples)), samples.__getitem__)
        return samples[: self._whole(len(samples))]

    def _whole(self, samples: int) -> int:
        whole = samples - samples % self._batch_size
        if not whole:
            raise InputError(
                f"drop_last=True leaves nothing: an epoch has {samples} samples, and a batch {self._batch_size}."
            )
        return whole


def order_of(sampler: Any, dataset: Any) -> tuple[Any, bool, Order | None]:
    """Return the data set of a sampler, whether it is shuffled, and the order where that is not the plain one."""
    samples = len(dataset)
    kind = type(sampler)
    if isinstance(sampler, DistributedSampler):
        raise InputError(
            f"the DataLoader has a {kind.__name__}, which keeps one part for each rank; paceline deals the samples out, and "
            "would use a part of each part. Leave the sampler out and say shuffle=True."
        )
    if kind is SequentialSampler and len(sampler) == samples:
        return dataset, False, None
    if kind is RandomSampler or (
        kind.__module__.startswith(TORCHDATA) and kind.__name__ == RandomSampler.__name__
    ):
        drawn_from, drawn = len(sampler.data_source), sampler.num_samples
        if sampler.replacement:
            return dataset, True, Weighted(np.ones(drawn_from), drawn)
        plain = drawn == drawn_from == samples
        return dataset, True, None if plain else Rounds(drawn_from, drawn)
    if kind is SubsetRandomSampler:
        return Subset(dataset, [_number(sampler, one) for one in sampler.indices]), True, None
    if kind is WeightedRandomSampler:
        weights = sampler.weights.detach().cpu().double().numpy()
        return dataset, True, Weighted(weights, sampler.num_samples, replacement=bool(sampler.replacement))
    return dataset, False, Rerun(sampler)


def without_rest(dataset: Any, shuffle: bool, order: Order | None, batch_size: int) -> Order | None:
    """Return an order that drops a last batch which is not whole; None where there is none to drop."""
    if order is None:
        if len(dataset) % batch_size == 0:
            return None
        order = Rounds(len(dataset), len(dataset), shuffle=shuffle)
    return WholeBatches(order, batch_size)


def is_plain(batch_sampler: Any) -> bool:
    """Return whether a batch sampler does nothing but cut what its sampler gives."""
    return type(batch_sampler) is BatchSampler


def _number(sampler: Any, sample: Any) -> int:
    """Return the number of a sample; raise where it is none: 1.9 would become sample 1 in silence."""
    try:
        return operator.index(sample)
    except TypeError as error:
        raise InputError(
            f"the {type(sampler).__name__} gives {sample!r:.80}, and samples are known by whole numbers here, from 0. Have it "
            "give those, and look up what they stand for in the data set's __getitem__."
        ) from error


def _nested(sampler: Any) -> list[Any]:
    """Return a sampler and those that it goes through."""
    inner = getattr(sampler, "sampler", None)
    return [sampler] if inner is None or inner is sampler else [sampler, *_nested(inner)]


def _length(sampler: Any) -> int | None:
    try:
        return len(sampler) if isinstance(sampler, Sized) else None
    except (TypeError, NotImplementedError):
        return None
