"""A loop that catches an error and returns: servers compute no loss and see none of it, and leave with the trainers."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline

ROWS = [(torch.tensor([place % 5]), torch.ones(2) * place) for place in range(24)]


def train(run: paceline.Run, bad: int, trainer: int | None) -> tuple[str, int]:
    """Leave at a step in which some trainers meet an error; gives why, and behind how many steps."""
    model, _ = run.prepare(
        lambda: nn.Embedding(5, 2, sparse=run._engine.state.strategy.name == "hybrid"),
        lambda made: torch.optim.SGD(made.parameters(), lr=0.1),
    )
    try:
        for step in run.steps(ROWS, batch_size=4, epochs=1):
            for numbers, targets in step:
                if step.number == bad and trainer in (None, run.world.rank):
                    raise paceline.InputError("a bad row")
                step.backward(F.mse_loss(model(numbers).squeeze(1), targets, reduction="none").sum(1))
            step.apply()
    except paceline.InputError as error:
        return str(error), run._engine.state.position.number
    return "", run._engine.state.position.number


@pytest.mark.parametrize(("strategy", "bad"), [("ps", 0), ("hybrid", 2)])
def test_servers_leave_when_all_trainers_have(strategy: str, bad: int) -> None:
    *trainers, server = paceline.launch(
        train, bad, None, strategy=strategy, workers=2, servers=1, threads=1, device="cpu"
    )
    assert trainers == [("a bad row", bad)] * 2
    assert "rank 0 left the loop of run.steps" in server[0]
    assert server[1] == bad


def test_whoever_waits_for_one_trainer_that_has_left_is_told() -> None:
    kept, left, server = paceline.launch(
        train, 2, 1, strategy="ps", workers=2, servers=1, threads=1, device="cpu"
    )
    assert left == ("a bad row", 2)
    assert "rank 1 left the loop of run.steps after step 1" in kept[0]
    # By then the other trainer may have been told, and have left too.
    assert re.search("rank [01] left the loop of run.steps after step 1", server[0])
    for words, steps in (kept, server):
        assert f"in step {steps}. All workers must leave it at the same step" in words
        assert steps == 2
