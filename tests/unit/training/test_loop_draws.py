"""What a loop draws outside of its batches follows from the seed and the place in the run; inside, the shard's stream."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from paceline import Run
from paceline.world import seeds
from tests.unit.training.own_runs import data, losses, opened, prepared, resumed

Drawn = dict[str, tuple[float, float, float]]


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(()).item()


def go(run: Run, leave: int | None = None) -> Drawn:
    """Take two calls of six steps, of which the first is left at its fifth, and draw wherever a loop may."""
    model, _ = prepared(run)
    drawn: Drawn = {}

    def end_epoch(epoch: int) -> None:
        drawn[f"epoch {epoch}"] = draw()

    for call in range(2):
        for step in run.steps(data(), batch_size=8, epochs=2, after_epoch=end_epoch):
            number = step.number
            drawn[f"step {number}"] = draw()
            for _ in step:
                draw()  # of the shard, of which a worker has one or several
            drawn[f"looked {number}"] = draw()
            for batch in step:
                step.backward(losses(model, batch))
            drawn[f"batches {number}"] = draw()
            step.apply()
            drawn[f"applied {number}"] = draw()
            if leave == number:
                run._engine.calls.finish()
                return drawn
            if number == 4:
                break
        drawn[f"behind call {call}"] = draw()
    run._engine.calls.finish()
    return drawn


@pytest.fixture(scope="module")
def whole() -> Drawn:
    with opened(shards=2) as run:
        return go(run)


def test_every_place_has_numbers_of_its_own(whole: Drawn) -> None:
    assert len(whole) == 11 * 4 + 3 + 2
    for column in zip(*whole.values(), strict=True):
        assert len(set(column)) == len(whole)


@pytest.mark.parametrize("leave", [2, 3, 6], ids=lambda number: f"left behind step {number}")
def test_a_resumed_run_draws_the_same(leave: int, tmp_path: Path, whole: Drawn) -> None:
    with opened(shards=2, out=tmp_path) as run:
        before = go(run, leave)
    with resumed(tmp_path, shards=2) as run:
        after = go(run)
    assert before.items() <= whole.items()
    assert after.items() <= whole.items()
    assert before.keys() | after.keys() == whole.keys()


def test_batches_meet_the_stream_of_their_shard() -> None:
    wanted, found = [], []
    with opened(shards=2, seed=5) as run:
        prepared(run)
        step = next(iter(run.steps(data(), batch_size=8, epochs=1)))
        for shard, _ in enumerate(step):
            found.append(draw())
            with seeds.preserved():
                seeds.seed_everything(seeds.derive(5, "shard", 0, shard))
                wanted.append(draw())
    assert found == wanted


def test_a_seed_of_the_loop_s_own_governs_the_model_it_makes_and_what_it_draws_next() -> None:
    def start(seed: int) -> Any:
        with opened() as run:
            torch.manual_seed(seed)
            model, _ = prepared(run)
            return model.weight.tolist(), torch.rand(3).tolist()

    torch.manual_seed(3)
    wanted = nn.Linear(4, 1).weight.tolist(), torch.rand(3).tolist()
    assert start(3) == wanted
    assert start(4) != start(3)


def test_a_function_that_makes_the_model_leaves_the_loop_numbers_of_its_own() -> None:
    def start(draws: int) -> Any:
        with opened() as run:
            torch.rand(draws)
            model, _ = run.prepare(lambda: nn.Linear(4, 1), lambda made: torch.optim.SGD(made.parameters()))
            return model.weight.flatten().tolist(), torch.rand(4).mul(2).sub(1).div(2).tolist()

    weights, drawn = start(0)
    assert weights != drawn
    assert start(7) == (weights, drawn)
