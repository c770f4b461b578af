"""Reading a stream: a data set that can only be iterated over, in its own order.

Every worker reads the same stream and keeps the items of its own shards, so each item goes to exactly one
worker. The global batch of step s is the items [s * batch_size, (s + 1) * batch_size). An epoch ends where
the stream does.

What the stream draws from torch, numpy or `random` while it gives the items of a step is a function of (seed,
epoch, step), and leaves the training process's generators as they were. A stream with `set_epoch` (Hugging Face shuffles by
it) is told each epoch before it is read, wherever in it reading begins. A resumed stream is read again from
its beginning and so continues exactly. One that knows a shorter way may define `seek(position)`: the next
`__iter__` then starts at that item; such a stream must not carry draws over from earlier items. One with `state_dict` and
`load_state_dict` goes on where a state says (see `stream_state`).
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, default_collate

from paceline.data.contents import contents_of
from paceline.data.copying import copied
from paceline.data.epochs import epoch_setters, tell_epoch
from paceline.data.generators import GeneratorsAside, seed_generators
from paceline.data.loading import LoadingOptions, StreamProcess
from paceline.data.reading import Collate
from paceline.data.shards import shard_bounds
from paceline.data.step_data import ShardData, StepData, split_micro_batches
from paceline.data.stream_state import StreamStates, has_state
from paceline.errors import InputError
from paceline.world.seeds import derive


def is_stream(dataset: Any) -> bool:
    """Return whether a data set can only be iterated over."""
    # torch's IterableDataset has a __getitem__ too: one that raises NotImplementedError.
    return isinstance(dataset, IterableDataset) or (
        hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")
    )


class Stream:
    """The steps of the owned shards of a stream, read in this process."""

    def __init__(
        self,
        dataset: Iterable[Any],
        *,
        batch_size: int,
        shards: int,
        seed: int,
        owned: range,
        micro_batch: int | None,
        collate: Collate | None,
    ) -> None:
        self._dataset: Any
        self._dataset, self._batch_size, self._seed = dataset, batch_size, seed
        self._shards, self._owned, self._micro_batch = shards, owned, micro_batch
        self._collate = collate
        self._aside, self._aside_to_look = GeneratorsAside(), GeneratorsAside()
        self.notes_contents = False
        """Whether a step says what its items hold: the first that is read, and the steps 1, 2, 4, 8 and so on."""
        self.keeps_states = False
        """Whether a step says what the stream's state is behind it."""
        self.state: Any = None
        """The state at which the next reading begins, where one is known."""
        self._states = StreamStates(dataset) if has_state(dataset) and not hasattr(dataset, "seek") else None
        self.tells_beginning = False
        """Whether there is a step of no items where no other is left: it says what the epoch began with."""

    def steps(self, epoch: int, start_step: int) -> Generator[StepData]:
        """Yield the steps of an epoch from `start_step` on."""
        source, first = self._opened(epoch, start_step)
        reads_first = first == 0 and getattr(source, "seek", None) is None
        items: Iterator[Any] | None = None
        beginning: str | None = None
        before: Any = None
        for step in count(first):
            with self._aside:
                self._seed_step(epoch, step)
                if items is None:
                    if not reads_first and source is self._dataset:
                        source.seek(start_step * self._batch_size)
                    items = iter(source)
                batch = self._next_batch(items, epoch, step)
                compares = self.notes_contents and (step == start_step or (step + 1).bit_count() == 1)
                looks = step == 0 or (compares and step >= start_step)
                contents = self._look(batch) if looks else None
                if step == 0 and len(batch) > 1 and reads_first:
                    beginning = contents or ""
                before, note = self._state(source, epoch, step, batch, before)
                data = (
                    replace(
                        self._step_data(epoch, step, batch),
                        contents=contents if compares else None,
                        beginning=beginning if step == start_step else None,
                        state=before if self._states is not None and self._states.trusted else None,
                        note=note,
                    )
                    if batch and step >= start_step
                    else None
                )
            if not batch and step == 0:
                raise InputError("the data set is empty: its stream gave no item. Give one with samples.")
            if data is not None:
                yield data
            if len(batch) < self._batch_size:
                if self.tells_beginning and beginning is not None and data is None and step <= start_step:
                    yield StepData(epoch, start_step, 0, (), None, beginning)
                return

    def _opened(self, epoch: int, start_step: int) -> tuple[Any, int]:
        """Return what is iterated over in this reading, and the step at which that begins."""
        states, state = self._states, self.state
        if states is not None and (self.keeps_states or state is not None):
            states.begin()
            if state is not None and start_step and states.usable:
                with self._aside:
                    goes_on = states.goes_on(
                        epoch, state, self._batch_size, lambda: self._seed_step(epoch, 0)
                    )
                    if goes_on:
                        return states.opened(epoch, state), start_step
        tell_epoch(epoch_setters(self._dataset), epoch, anew=True)
        return self._dataset, start_step if hasattr(self._dataset, "seek") else 0

    def _state(
        self, source: Any, epoch: int, step: int, batch: list[Any], before: Any
    ) -> tuple[Any, str | None]:
        """Return the state behind a batch, and what is to be said where none can be used any more.

        States are tried where the first can be, and in the steps 1, 3, 7 and so on.
        """
        states = self._states
        if states is None or not self.keeps_states:
            return None, None
        if not states.usable or not batch:
            return None, states.fault
        after = states.of(source)
        if before is not None and (not states.trusted or (step + 1).bit_count() == 1):
            with self._aside_to_look:
                states.check(epoch, before, batch, lambda: self._seed_step(epoch, step))
        return after, states.fault

    def _seed_step(self, epoch: int, step: int) -> None:
        seed_generators(derive(self._seed, "stream", epoch, step))

    def own(self, owned: range) -> None:
        """Carry other shards from the next `steps` on."""
        self._owned = owned

    def close(self) -> None:
        """Nothing to end."""

    def _next_batch(self, items: Iterator[Any], epoch: int, step: int) -> list[Any]:
        """Read a whole global batch: until its end is seen, nobody knows whether it is the short last one."""
        batch: list[Any] = []
        try:
            for item in items:
                batch.append(item)
                if len(batch) == self._batch_size:
                    break
        except Exception as error:
            position = step * self._batch_size + len(batch)
            error.add_note(f"while reading sample {position} of the stream, in epoch {epoch}")
            raise
        return batch

    def _look(self, batch: list[Any]) -> str | None:
        """Return what a batch holds; items that draw where they are looked into draw the same once more."""
        with self._aside_to_look:
            return contents_of(batch)

    def _step_data(self, epoch: int, step: int, batch: list[Any]) -> StepData:
        parts = []
        for shard in self._owned:
            low, high = shard_bounds(shard, self._shards, len(batch))
            samples = np.arange(low, high, dtype=np.int64) + step * self._batch_size
            pieces = split_micro_batches(np.arange(low, high, dtype=np.int64), self._micro_batch)
            batches = [
                self._collated(epoch, step, [batch[place] for place in piece.tolist()], int(piece[0]))
                for piece in pieces
            ]
            parts.append(ShardData(shard, samples, batches))
        return StepData(epoch, step, len(batch), tuple(parts))

    def _collated(self, epoch: int, step: int, items: list[Any], place: int) -> Any:
        first = step * self._batch_size + place
        try:
            if self._collate is None:
                return default_collate(items)
            seed_generators(derive(self._seed, "collate", epoch, first))
            return copied(self._collate(items))  # it may fill the same memory for each batch
        except Exception as error:
            error.add_note(
                f"while collating samples {first} to {first + len(items) - 1} of the stream, in epoch {epoch}"
            )
            raise


class LoadedStream:
    """The steps of the owned shards of a stream, read ahead by one process."""

    def __init__(self, stream: Stream, options: LoadingOptions) -> None:
        self._stream = stream
        self._process = StreamProcess(options)

    def steps(self, epoch: int, start_step: int) -> Generator[StepData]:
        """Yield the steps of an epoch from `start_step` on."""
        yield from self._process.load(lambda: self._stream.steps(epoch, start_step))

    def own(self, owned: range) -> None:
        """Carry other shards from the next `steps` on."""
        self._stream.own(owned)

    def close(self) -> None:
        """End the loading process."""
        self._process.close()
