"""The steps of a data set that is read in an order of the run's own (see `orders`), and what of it workers compare."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from paceline.data.contents import ORDER
from paceline.data.generators import GeneratorsAside, seed_generators
from paceline.data.map_style import StepPlan
from paceline.data.orders import Batches, Computed, Order
from paceline.data.permutation import Indices
from paceline.data.shards import batch_bounds, shard_bounds, steps_per_epoch
from paceline.data.step_data import split_micro_batches
from paceline.errors import InputError
from paceline.world.seeds import derive

_HASHED, _SHOWN = 1 << 16, 4


@dataclass(frozen=True)
class _Epoch:
    """The order of one epoch."""

    samples: Any
    """An array, or `Computed`."""
    steps: int
    ends: Indices | None
    """Where each global batch ends, where the order makes them."""
    contents: str

    def bounds(self, step: int, batch_size: int) -> tuple[int, int]:
        if self.ends is None:
            return batch_bounds(step, batch_size, len(self.samples))
        return int(self.ends[step - 1]) if step else 0, int(self.ends[step])


class OrderedSchedule:
    """The samples of the owned shards, step by step, in an order of the run's own.

    The records of the run hold positions, `step * batch_size` and the place in the batch: which samples an order gives there
    they cannot know.
    """

    def __init__(
        self,
        order: Order,
        *,
        samples: int,
        seed: int,
        batch_size: int,
        shards: int,
        owned: range,
        micro_batch: int | None = None,
        with_positions: bool = False,
    ) -> None:
        self._order, self._samples, self._seed = order, samples, seed
        self._batch_size, self._shards, self._micro_batch = batch_size, shards, micro_batch
        self._with_positions = with_positions
        """Whether micro-batches hold positions beside the samples: what is drawn for a sample depends on them."""
        self.owned = owned
        own = getattr(order, "batch_size", None)
        if own is not None and own != batch_size:
            raise InputError(
                f"the order makes batches of {own} samples and the run has batches of {batch_size}. "
                "Give both the same batch_size."
            )
        known = getattr(order, "made_for", None)
        if known is not None and known != samples:
            raise InputError(
                f"the {type(order).__name__} is made for {known} samples, and the data set has {samples}: some would never be "
                "read. Give it one number for each sample."
            )
        said = getattr(order, "samples_per_epoch", None)
        self.steps_per_epoch: int | None = (
            getattr(order, "batches_per_epoch", None) if said is None else steps_per_epoch(said, batch_size)
        )
        self._made: tuple[int, _Epoch] | None = None
        self._aside = GeneratorsAside()
        self.notes_contents = self.tells_beginning = False

    def steps(self, epoch: int, start_step: int) -> Iterator[StepPlan]:
        """Yield the steps of an epoch from `start_step` on; the first has what workers compare of the order."""
        made = self._epoch(epoch)
        contents = made.contents if self.notes_contents else None
        for step in range(start_step, made.steps):
            low, high = made.bounds(step, self._batch_size)
            spans = [shard_bounds(shard, self._shards, high - low) for shard in self.owned]
            start, stop = (spans[0][0], spans[-1][1]) if spans else (0, 0)
            chosen = self._checked(
                _as_numbers(made.samples[np.arange(low + start, low + stop)], epoch), epoch
            )
            positions = step * self._batch_size + np.arange(start, stop, dtype=np.int64)
            read = np.stack([chosen, positions], axis=1) if self._with_positions else chosen
            first = step == start_step
            yield StepPlan(
                epoch,
                step,
                high - low,
                self.owned,
                [positions[one - start : other - start] for one, other in spans],
                [
                    split_micro_batches(read[one - start : other - start], self._micro_batch)
                    for one, other in spans
                ],
                contents if first else None,
                made.contents if first else None,
            )
        if self.tells_beginning and start_step >= made.steps:
            yield StepPlan(epoch, start_step, 0, range(0), [], [], None, made.contents)

    def _epoch(self, epoch: int) -> _Epoch:
        if self._made is None or self._made[0] != epoch:
            with self._aside:
                seed_generators(derive(self._seed, "own order", epoch))
                try:
                    given = self._order(self._seed, epoch)
                except InputError:
                    raise
                except Exception as error:
                    error.add_note(f"while the order of epoch {epoch} was made")
                    raise
                # Inside, for an order may be a generator, which draws as it is gone through.
                self._made = (epoch, self._read(given, epoch))
        return self._made[1]

    def _read(self, given: Any, epoch: int) -> _Epoch:
        """Check what an order has returned, and cut it into batches."""
        batched = isinstance(given, Batches)
        samples = given.samples if batched else given
        if not isinstance(samples, Computed):
            samples = self._checked(_as_numbers(samples, epoch), epoch)
        if batched:
            sizes = given.sizes
            if (sizes < 1).any() or (sizes > self._batch_size).any() or sizes.sum() != len(samples):
                raise InputError(
                    f"the order gives batches of {sizes.min(initial=0)} to {sizes.max(initial=0)} samples in epoch {epoch}, "
                    f"together {sizes.sum()} of {len(samples)}. Each holds one at least, and "
                    f"batch_size={self._batch_size} at most."
                )
            steps, ends = len(sizes), np.cumsum(sizes)
        else:
            steps, ends = steps_per_epoch(len(samples), self._batch_size), None
        if not steps:
            raise InputError(f"the order has no sample in epoch {epoch}. Give one with samples.")
        if self.steps_per_epoch not in (None, steps):
            raise InputError(
                f"the order gives {steps} batches in epoch {epoch}, and says that each epoch has {self.steps_per_epoch}. "
                "Leave samples_per_epoch and batches_per_epoch out where epochs differ."
            )
        return _Epoch(samples, steps, ends, _contents(samples, steps, ends))

    def _checked(self, samples: Indices, epoch: int) -> Indices:
        outside = (samples < 0) | (samples >= self._samples)
        if outside.any():
            raise InputError(
                f"the order names sample {int(samples[outside][0])} in epoch {epoch}, and the data set has {self._samples}, "
                "counted from 0."
            )
        return samples


def _contents(samples: Any, steps: int, ends: Indices | None) -> str:
    """Return the hash of an epoch's order, of one too long of samples spread over it."""
    count = len(samples)
    places = np.unique(np.linspace(0, count - 1, min(count, _HASHED)).astype(np.int64))
    whole = samples if isinstance(samples, np.ndarray) else samples[places]
    made = blake2b(np.ascontiguousarray(whole, dtype="<i8").tobytes(), digest_size=8)
    made.update(f"{count} {steps}".encode() if ends is None else ends.astype("<i8").tobytes())
    first = samples[np.arange(min(count, _SHOWN))].tolist()
    shown = f"{', '.join(map(str, first))} and so on, {count} samples in {steps} batches"
    return json.dumps({ORDER: [made.hexdigest(), count, True, shown]})


def _as_numbers(given: Any, epoch: int) -> Indices:
    try:
        found = np.asarray(given if hasattr(given, "__array__") else list(given))
    except (TypeError, ValueError) as error:
        raise InputError(_what(type(given).__name__, epoch)) from error
    if found.ndim != 1 or (len(found) and found.dtype.kind not in "iu"):
        raise InputError(_what(f"{found.dtype} of the shape {list(found.shape)}", epoch))
    return found.astype(np.int64)


def _what(given: str, epoch: int) -> str:
    return (
        f"the order returned {given} for epoch {epoch}. An order is a function of (seed, epoch) that returns the numbers of "
        "samples, one after the other; lists of them, one for each batch, are paceline.data.Batches.of(lists)."
    )
