"""Streams with states: gone on with where they were, by any number of workers; not where a state does not bring them back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from paceline.data import ShardedLoader, StepData
from tests.unit.data.sources import comparable, loader_of

ITEMS = 100


class Files:
    """As Hugging Face's `IterableDataset`: files in an order by epoch, a state of (file, line), used if it is of this epoch."""

    def __init__(self, buffer: int = 0, items: int = ITEMS) -> None:
        self.items, self.buffer, self.epoch, self.read = items, buffer, 0, 0
        self._starting_state_dict: Any = None
        self._state_dict: Any = None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> Any:
        return self._state_dict

    def load_state_dict(self, state: Any) -> None:
        self._starting_state_dict = state

    def __iter__(self) -> Iterator[Any]:
        state = self._state_dict = {"epoch": self.epoch, "file": 0, "line": 0}
        if self._starting_state_dict and self._starting_state_dict["epoch"] == self.epoch:
            state.update(self._starting_state_dict)
        held: list[Any] = []
        draw = random.Random(self.epoch)
        for item in self._lines(state):
            held.append(item)
            if len(held) > self.buffer:
                yield held.pop(draw.randrange(len(held)) if self.buffer else 0)
        yield from held

    def _lines(self, state: dict[str, int]) -> Iterator[Any]:
        files = [list(range(start, min(start + 7, self.items))) for start in range(0, self.items, 7)]
        random.Random(self.epoch).shuffle(files)
        for number in range(state["file"], len(files)):
            first = state["line"]
            for line in range(first, len(files[number])):
                self.read += 1
                state.update(file=number, line=line + 1)
                yield torch.tensor([files[number][line], torch.rand(()).item()])
            state["line"] = 0


class Restarting(Files):
    """Begins anew where its state is that of the end, as a Loader of torchdata's."""

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(None if state["file"] * 7 + state["line"] >= self.items else state)


class Uncopied(Files):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("it has a socket")


def steps_of(loader: ShardedLoader, epoch: int, start: int = 0, state: Any = None) -> list[StepData]:
    try:
        return list(loader.epoch(epoch, start, states=True, state=state, beginning=start > 0))
    finally:
        loader.close()


def said(steps: list[StepData]) -> list[Any]:
    return [(step.step, step.size, comparable(step)) for step in steps]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_run_goes_on_where_the_state_says(num_workers: int) -> None:
    alone = steps_of(loader_of(Files(), num_workers=num_workers), 1)
    assert [step.state is not None for step in alone[:4]] == [False, True, True, True]
    assert all(step.note is None for step in alone)
    for workers in (1, 2, 3):
        for start in (2, 5, 12):
            state = alone[start - 1].state
            streams = [Files() for _ in range(workers)]
            parts = [
                steps_of(
                    loader_of(stream, rank=rank, workers=workers, num_workers=num_workers), 1, start, state
                )
                for rank, stream in enumerate(streams)
            ]
            together = [
                (steps[0].step, steps[0].size, [shard for step in steps for shard in comparable(step)])
                for steps in zip(*parts, strict=True)
            ]
            assert together == said(alone[start:])
            assert [stream.read for stream in streams] == [0] * workers  # copies are read, and go on there
            assert all(steps[0].beginning is None for steps in parts)


def test_without_a_state_the_epoch_is_read_again() -> None:
    alone = steps_of(loader_of(Files()), 1)
    stream = Files()
    again = steps_of(loader_of(stream), 1, 4)
    assert said(again) == said(alone[4:])
    assert stream.read == ITEMS
    assert again[0].beginning


@pytest.mark.parametrize(
    ("stream", "words"),
    [(Files(buffer=20), "a shuffle buffer is lost"), (Uncopied(), "cannot be copied (TypeError: it has a s")],
)
def test_a_state_that_does_not_bring_it_back_is_not_used(stream: Any, words: str) -> None:
    steps = steps_of(loader_of(stream), 0)
    assert all(step.state is None for step in steps)
    notes = [step.note for step in steps if step.note]
    assert len(steps) == 13
    assert notes
    assert words in notes[0]
    assert "reads the epoch again" in notes[0]


def test_a_stream_that_would_begin_anew_at_its_end_is_read_again() -> None:
    whole = steps_of(loader_of(Restarting(items=96)), 0)
    assert len(whole) == 12
    assert whole[-1].state is not None
    (left,) = steps_of(loader_of(Restarting(items=96)), 0, 12, whole[-1].state)
    assert (left.size, bool(left.beginning)) == (0, True)
    assert steps_of(loader_of(Files(items=96)), 0, 12, whole[-1].state) == []


def test_hugging_face_streams_go_on_and_their_shuffle_buffers_are_found_out() -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"x": list(range(ITEMS))}).to_iterable_dataset(num_shards=5)

    def steps(rows: Any, start: int = 0, state: Any = None) -> list[StepData]:
        loader = loader_of(rows.with_format("torch"), collate=lambda items: [item["x"] for item in items])
        return steps_of(loader, 1, start, state)

    alone = steps(rows)
    assert said(steps(rows, 5, alone[4].state)) == said(alone[5:])
    shuffled = steps(rows.shuffle(seed=3, buffer_size=20))
    assert all(step.state is None for step in shuffled)
    assert said(steps(rows.shuffle(seed=3, buffer_size=20), 5)) == said(shuffled[5:])


def test_nodes_of_torchdata_go_on() -> None:
    nodes = pytest.importorskip("torchdata.nodes")

    def loader() -> Any:
        return loader_of(nodes.Loader(nodes.IterableWrapper(range(ITEMS))))

    alone = steps_of(loader(), 1)
    assert alone[4].state is not None
    assert said(steps_of(loader(), 1, 5, alone[4].state)) == said(alone[5:])
