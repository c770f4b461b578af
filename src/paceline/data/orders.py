"""Orders of samples other than the plain one: which samples an epoch reads, one after the other, or batch by batch.

An order is a function of (seed, epoch) and of nothing else, so that any number of workers, a resumed run and one that has lost a
worker read the same. It returns the numbers of the samples in the data set: a list, an array or a tensor, which the run cuts into
its global batches; `Computed`, where they are too many to be held; or `Batches`, where it says which samples make a batch.
What it draws from torch, numpy or `random` is seeded by (seed, epoch).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline.data.permutation import EpochPermutation, Indices
from paceline.errors import InputError
from paceline.ranges import COUNT
from paceline.world.seeds import derive

Order: TypeAlias = Callable[[int, int], Any]
"""(seed, epoch) -> numbers of samples, `Computed` or `Batches`.

It may have attributes: `samples_per_epoch` or `batches_per_epoch`, where every epoch has as many (schedules need to know), and
`batch_size`, where it makes the batches: the largest of them; `made_for`, where it has one number for each sample of the
data set: how many those are.
"""


class Computed:
    """The samples of an epoch, computed where they are read: `at` returns those at an array of positions."""

    def __init__(self, samples: int, at: Callable[[Indices], Indices]) -> None:
        self.samples, self._at = samples, at

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, positions: Indices) -> Indices:
        return self._at(positions)


def whole_numbers(what: str, given: ArrayLike) -> Indices:
    """Return whole numbers as an array; raise InputError for others, of which each would become another number in silence."""
    found = np.asarray(given)
    if found.ndim != 1 or (len(found) and found.dtype.kind not in "iu"):
        raise InputError(
            f"{what} are whole numbers, and {found.dtype} of the shape {list(found.shape)} was given."
        )
    return found.astype(np.int64)


def _real_numbers(what: str, given: Any) -> NDArray[Any]:
    """Return numbers, one for each sample, as an array; a tensor of any type and device may bring them."""
    if callable(getattr(given, "detach", None)):
        given = given.detach().cpu()
        given = given.double().numpy() if given.is_floating_point() else given.numpy()
    found = np.asarray(given)
    if found.ndim != 1 or found.dtype.kind not in "biuf":
        raise InputError(
            f"{what} are numbers, one for each sample, and {found.dtype} of the shape {list(found.shape)} was given."
        )
    return found


class Batches:
    """The samples of an epoch, and how many of them each global batch holds."""

    def __init__(self, samples: Any, sizes: ArrayLike) -> None:
        self.samples = samples
        self.sizes = whole_numbers("the sizes of batches", sizes)

    @classmethod
    def of(cls, batches: Iterable[Sequence[int]]) -> Batches:
        """Return the epoch that is made of lists of sample numbers, one for each global batch."""
        held = [whole_numbers("the samples of a batch", batch) for batch in batches]
        whole = np.concatenate(held) if held else np.empty(0, dtype=np.int64)
        return cls(whole, [len(batch) for batch in held])


class Weighted:
    """Draws samples by their weights: with replacement at each position by itself, without it each sample at most once."""

    def __init__(
        self, weights: ArrayLike, samples_per_epoch: int | None = None, *, replacement: bool = True
    ) -> None:
        self.weights: NDArray[np.float64] = _real_numbers("weights of samples", weights).astype(np.float64)
        if not np.isfinite(self.weights).all() or (self.weights < 0).any():
            raise InputError("weights of samples are finite numbers from 0, one for each sample.")
        drawable = int(np.count_nonzero(self.weights))
        self.samples_per_epoch = COUNT.read(
            "samples_per_epoch", len(self.weights) if samples_per_epoch is None else samples_per_epoch
        )
        if drawable == 0 or (not replacement and drawable < self.samples_per_epoch):
            raise InputError(
                f"{self.samples_per_epoch} samples cannot be drawn {'' if replacement else 'without replacement '}from "
                f"{len(self.weights)}, of which {drawable} have a weight above 0."
            )
        self.replacement = replacement
        # By a power of two, which rounds nothing: the sum of large ones ends at infinity, and so does a quotient by small ones.
        self._scaled = np.ldexp(self.weights, -int(np.frexp(self.weights.max())[1]))
        self._bounds = np.cumsum(self._scaled)
        self._last = int(np.flatnonzero(self._scaled)[-1])

    def __call__(self, seed: int, epoch: int) -> Any:
        """Return the samples of an epoch."""
        key = derive(seed, "weighted", epoch)
        if self.replacement:
            return Computed(self.samples_per_epoch, lambda positions: self._drawn(key, positions))
        # The k smallest of -log(u) / w are a draw of k without replacement (Efraimidis and Spirakis).
        drawn = uniform(key, np.arange(len(self.weights), dtype=np.int64))
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            keys = -np.log1p(-drawn) / self._scaled
        drawable = np.flatnonzero(self.weights)
        drawn_first: Indices = drawable[np.argsort(keys[drawable], kind="stable")].astype(np.int64)
        return drawn_first[: self.samples_per_epoch]

    def _drawn(self, key: int, positions: Indices) -> Indices:
        places = uniform(key, positions) * self._bounds[-1]
        found: Indices = np.searchsorted(self._bounds, places, side="right").astype(np.int64)
        return np.minimum(found, self._last)


class Bucketed:
    """Makes global batches of samples of like length, in shuffled order; every sample is used once an epoch.

    The samples are shuffled and taken in windows of `window` batches; each is sorted by length and cut, and all batches are
    shuffled. A larger window makes batches more alike, and leaves less to chance.
    """

    def __init__(self, lengths: ArrayLike, batch_size: int, *, window: int = 100) -> None:
        self.lengths = _real_numbers("lengths of samples", lengths)
        if not len(self.lengths):
            raise InputError("lengths of samples are numbers, one for each sample.")
        self.made_for = len(self.lengths)
        self.batch_size = COUNT.read("batch_size", batch_size)
        self.window = COUNT.read("window", window)
        self.batches_per_epoch = -(-len(self.lengths) // self.batch_size)

    def __call__(self, seed: int, epoch: int) -> Batches:
        """Return the batches of an epoch."""
        samples, width = len(self.lengths), self.window * self.batch_size
        order = EpochPermutation(samples, seed).indices(epoch, 0, samples)
        for start in range(0, samples, width):
            some = order[start : start + width]
            order[start : start + width] = some[np.argsort(self.lengths[some], kind="stable")]
        turns = EpochPermutation(self.batches_per_epoch, derive(seed, "bucketed"))
        chosen = turns.indices(epoch, 0, self.batches_per_epoch) * self.batch_size
        sizes = np.minimum(self.batch_size, samples - chosen)
        offsets = np.repeat(chosen - (np.cumsum(sizes) - sizes), sizes)
        return Batches(order[offsets + np.arange(samples)], sizes)


class Curriculum:
    """Begins with what is easy: in each epoch the share `share(epoch)` of the samples that are least difficult, shuffled."""

    def __init__(self, difficulty: ArrayLike, share: Callable[[int], float]) -> None:
        self._easiest_first = np.argsort(_real_numbers("difficulties", difficulty), kind="stable").astype(
            np.int64
        )
        self.made_for = len(self._easiest_first)
        self._share = share

    def __call__(self, seed: int, epoch: int) -> Indices:
        """Return the samples of an epoch."""
        share = float(self._share(epoch))
        if not 0 < share <= 1:
            raise InputError(
                f"the share of samples in epoch {epoch} is {share}, but must be above 0 and at most 1."
            )
        taken = max(1, round(share * len(self._easiest_first)))
        chosen: Indices = self._easiest_first[EpochPermutation(taken, seed).indices(epoch, 0, taken)]
        return chosen


class Rounds:
    """Any number of samples: the whole data set as often as it fits, each time in another order, and a part of it."""

    def __init__(self, samples: int, samples_per_epoch: int, *, shuffle: bool = True) -> None:
        self.samples, self.samples_per_epoch, self.shuffle = samples, samples_per_epoch, shuffle

    def __call__(self, seed: int, epoch: int) -> Computed:
        """Return the samples of an epoch."""

        def at(positions: Indices) -> Indices:
            rounds, places = np.divmod(positions, self.samples)
            found = np.empty(len(positions), dtype=np.int64)
            for one in np.unique(rounds).tolist():
                # The first round is the order of a run without one of its own.
                order = EpochPermutation(
                    self.samples, derive(seed, "round", one) if one else seed, self.shuffle
                )
                found[rounds == one] = order.at(epoch, places[rounds == one])
            return found

        return Computed(self.samples_per_epoch, at)


def uniform(key: int, positions: Indices) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each position: splitmix64 of a keyed counter, the same on every machine."""
    words = positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
