"""A run that is resumed, or goes back a step, goes on in its stream where the stream's state says, to the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from paceline.data import StepData
from paceline.recovery.position import Position
from paceline.training.checks.epoch_starts import EpochStarts
from tests.unit.data.test_stream_states import Files
from tests.unit.training.own_runs import opened, prepared, resumed


class Pairs(Files):
    """Files of pairs for a linear model."""

    def __iter__(self) -> Any:
        for item in super().__iter__():
            yield torch.full((4,), item[0].item() / 50), item[1:]


def trained(run: Any, stream: Any, steps: int) -> str:
    model, _ = prepared(run)
    for step in run.steps(stream, batch_size=8, steps=steps):
        for x, y in step:
            losses = (model(x) - y).square()
            step.backward(losses.sum(), len(losses))
        step.apply()
    return str(run.weights_sha256())


def test_a_resumed_run_does_not_read_the_epoch_again(tmp_path: Path) -> None:
    with opened() as run:
        wanted = trained(run, Pairs(), 22)
    for place, last in (("early", 9), ("late", 19)):  # 13 steps an epoch
        with opened(out=tmp_path / place) as run:
            trained(run, Pairs(), last)
        with resumed(tmp_path / place) as run:
            state = run._engine.state
            stream = Pairs()
            assert trained(run, stream, 22) == wanted
            assert state.epoch_starts.state_at(state.position) is not None
            # A copy goes on; the next epoch is the stream's own.
            assert stream.read == (72 if last == 9 else 0)


def test_a_buffer_that_is_lost_is_said_and_the_epoch_is_read_again(tmp_path: Path) -> None:
    with opened() as run:
        wanted = trained(run, Pairs(buffer=20), 22)
    heard: list[str] = []
    with opened(out=tmp_path) as run:
        run._engine.state.emit = lambda event: heard.append(getattr(event, "text", ""))  # type: ignore[method-assign]
        trained(run, Pairs(buffer=20), 9)
    assert sum("a shuffle buffer is lost" in text for text in heard) == 1
    with resumed(tmp_path) as run:
        assert trained(run, Pairs(buffer=20), 22) == wanted


def test_states_go_to_those_that_stand_at_the_same_step() -> None:
    knows, joins, elsewhere = EpochStarts(), EpochStarts(), EpochStarts()
    here, there = Position(epoch=1, step=3, number=9), Position(epoch=1, step=2, number=8)
    knows.load(here, {"began": "{}", "last": "", "first": "{}", "call": 0, "call's first": "{}"})
    assert knows.note_state(here, StepData(1, 2, 8, (), state={"line": 3})) is None
    joins.adopt(here, here, knows.at(here))
    elsewhere.adopt(there, here, knows.at(here))
    assert joins.state_at(here) == {"line": 3}
    assert elsewhere.state_at(there) is None
    odd = StepData(1, 3, 8, (), state=object())
    assert "cannot save the state of the stream" in str(knows.note_state(here, odd))
    assert knows.note_state(here, odd) is None
