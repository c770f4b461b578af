"""Reading a map-style data set: one with `__getitem__` and `__len__`, in the order that the seed gives."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from itertools import islice, tee
from typing import Any

from paceline.data.loading import LoadingOptions, LoadingProcesses
from paceline.data.permutation import Indices
from paceline.data.reading import Reader
from paceline.data.schedule import Schedule
from paceline.data.step_data import ShardData, StepData, split_micro_batches


class MapStyle:
    """The steps of the owned shards of a map-style data set, read in this process."""

    def __init__(self, schedule: Schedule, reader: Reader, micro_batch: int | None) -> None:
        self._schedule, self._reader, self._micro_batch = schedule, reader, micro_batch

    def steps(self, epoch: int, start_step: int) -> Generator[StepData]:
        """Go through an epoch from a step on."""
        for plan in self._schedule.steps(epoch, start_step):
            cuts = [split_micro_batches(part, self._micro_batch) for part in plan.parts]
            batches = self._reader.read(epoch, [piece for cut in cuts for piece in cut])
            shards = _filled(self._schedule.owned, plan.parts, cuts, iter(batches))
            yield StepData(epoch, plan.step, plan.size, shards)

    def own(self, owned: range) -> None:
        """Carry other shards from the next `steps` on."""
        self._schedule.owned = owned

    def close(self) -> None:
        """Nothing to end."""


class LoadedMapStyle:
    """The steps of the owned shards of a map-style data set, read ahead by other processes."""

    def __init__(
        self, schedule: Schedule, reader: Reader, micro_batch: int | None, options: LoadingOptions
    ) -> None:
        self._schedule, self._micro_batch = schedule, micro_batch
        self._processes = LoadingProcesses(reader, options)

    def steps(self, epoch: int, start_step: int) -> Generator[StepData]:
        """Go through an epoch from a step on."""
        plans, ahead = tee(self._schedule.steps(epoch, start_step))
        batches = self._processes.load(
            (epoch, piece)
            for plan in ahead
            for part in plan.parts
            for piece in split_micro_batches(part, self._micro_batch)
        )
        for plan in plans:
            cuts = [split_micro_batches(part, self._micro_batch) for part in plan.parts]
            shards = _filled(self._schedule.owned, plan.parts, cuts, batches)
            yield StepData(epoch, plan.step, plan.size, shards)

    def own(self, owned: range) -> None:
        """Carry other shards from the next `steps` on."""
        self._schedule.owned = owned

    def close(self) -> None:
        """End the loading processes."""
        self._processes.close()


def _filled(
    owned: range, parts: Sequence[Indices], cuts: Sequence[Sequence[Indices]], batches: Iterator[Any]
) -> tuple[ShardData, ...]:
    """Hand each shard as many of the coming batches as it has pieces."""
    return tuple(
        [
            ShardData(shard, part, list(islice(batches, len(cut))))
            for shard, part, cut in zip(owned, parts, cuts, strict=True)
        ]
    )
