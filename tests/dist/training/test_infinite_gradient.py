"""A finite loss with an infinite gradient: the step is named, no sample is blamed, and no checkpoint holds what is no number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline
from paceline import Loss
from paceline.errors import NonFiniteLossError, WorkerFailedError
from tests.dist.strategies.scenarios import BATCH, data

BAD = 3
"""The step whose gradient is infinite while its loss is finite."""


def steep(run: paceline.Run, max_grad_norm: float | None, steps: int) -> tuple[str, bool, int]:
    """Train until it is refused; returns the words, whether the weights are finite, and where the run stands."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 3))
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    words = ""
    try:
        for step in run.steps(data(), batch_size=BATCH, steps=steps, max_grad_norm=max_grad_norm):
            for features, labels in step:
                scores = model(features)
                losses = F.cross_entropy(scores, labels, reduction="none")
                if step.number == BAD:
                    losses = (
                        losses + (scores - scores.detach()).square().sum(1).sqrt()
                    )  # 0, whose slope is infinite
                step.backward(Loss.mean(losses))
            step.apply()
    except NonFiniteLossError as error:
        if max_grad_norm is None:
            raise
        words = str(error)
    finite = all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    return words, finite, run._engine.state.position.number


def train(strategy: str, workers: int, *arguments: Any, **options: Any) -> tuple[str, bool, int]:
    first, *others = paceline.launch(
        steep, *arguments, strategy=strategy, workers=workers, shards=2, threads=1, **options
    )
    assert all(other == first for other in others)
    found: tuple[str, bool, int] = first
    return found


@pytest.mark.parametrize(
    ("strategy", "workers"), [("single", 1), ("dp", 2), ("ddp", 2), ("fsdp", 2), ("ps", 2), ("local-sgd", 2)]
)
def test_with_a_norm_it_is_found_before_the_update(strategy: str, workers: int) -> None:
    words, finite, number = train(strategy, workers, 1.0, 6)
    assert words.startswith(f"step {BAD}: the norm of the gradient is nan, though the loss is ")
    assert words.endswith("The weights are as they were before this step.")
    assert "samples" not in words
    assert finite
    assert number == BAD


@pytest.mark.parametrize(("strategy", "workers"), [("single", 1), ("ddp", 2), ("fsdp", 2)])
def test_without_one_the_next_step_says_what_is_true(strategy: str, workers: int) -> None:
    with pytest.raises(WorkerFailedError) as caught:
        paceline.launch(steep, None, 6, strategy=strategy, workers=workers, shards=2, threads=1)
    words = str(caught.value)
    assert f"step {BAD + 1}: the loss is nan. 0.weight was no number before this step began" in words
    assert "samples" not in words
    assert "as they were" not in words


@pytest.mark.parametrize(("strategy", "workers"), [("single", 1), ("ddp", 2)])
def test_the_end_of_a_run_looks_too(strategy: str, workers: int, tmp_path: Path) -> None:
    for options in ({}, {"out": tmp_path / "run", "save_every": "1"}):
        with pytest.raises(WorkerFailedError, match=f"after {BAD + 1} steps 0.weight holds nan or infinity"):
            paceline.launch(
                steep, None, BAD + 1, strategy=strategy, workers=workers, shards=2, threads=1, **options
            )
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert saved[-1] == f"step-{BAD}"
