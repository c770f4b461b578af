"""Reading a map-style data set: one with `__getitem__` and `__len__`, in the order that the seed gives."""

from __future__ import annotations

from collections.abc import Generator
from itertools import tee

from paceline.data.loading import LoadingOptions, LoadingProcesses
from paceline.data.reading import Reader
from paceline.data.schedule import Schedule
from paceline.data.step_data import StepData


class MapStyle:
    """The steps of the owned shards of a map-style data set, read in this process."""

    def __init__(self, schedule: Schedule, reader: Reader) -> None:
        self._schedule, self._reader = schedule, reader

    def steps(self, epoch: int, start_step: int) -> Generator[StepData]:
        """Yield the steps of an epoch from `start_step` on."""
        for plan in self._schedule.steps(epoch, start_step):
            batches = self._reader.read(epoch, [piece for pieces in plan.micro_batches for piece in pieces])
            yield plan.filled(iter(batches))

    def own(self, owned: range) -> None:
        """Carry other shards from the next `steps` on."""
        self._schedule.owned = owned

    def close(self) -> None:
        """Nothing to end."""


class LoadedMapStyle(MapStyle):
    """The steps of the owned shards of a map-style data set, read ahead by other processes."""

    def __init__(self, schedule: Schedule, reader: Reader, options: LoadingOptions) -> None:
        super().__init__(schedule, reader)
        self._processes = LoadingProcesses(reader, options)

    def steps(self, epoch: int, start_step: int) -> Generator[StepData]:
        """Yield the steps of an epoch from `start_step` on."""
        plans, ahead = tee(self._schedule.steps(epoch, start_step))
        batches = self._processes.load(
            (epoch, piece) for plan in ahead for pieces in plan.micro_batches for piece in pieces
        )
        for plan in plans:
            yield plan.filled(batches)

    def close(self) -> None:
        """End the loading processes."""
        self._processes.close()
