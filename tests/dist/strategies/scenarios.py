"""Runs many small loops of a user's own in one launch, each in a run of its own, and brings weights or errors home."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import PacelineError

Outcome = dict[str, Tensor] | str
Scenario = Callable[[paceline.Run], nn.Module]
BATCH = 8


def data() -> TensorDataset:
    """26 samples in batches of 8: the last batch has 2, so that some shards and workers have none."""
    source = torch.Generator().manual_seed(1)
    features = torch.randn(26, 6, generator=source)
    return TensorDataset(features, features[:, :3].argmax(1))


def work(run: paceline.Run, scenarios: Mapping[str, tuple[Scenario, dict[str, Any]]]) -> dict[str, Outcome]:
    """Run one after the other in the same world; an error of the user's input is an outcome."""
    outcomes: dict[str, Outcome] = {}
    for name, (scenario, options) in scenarios.items():
        own = paceline.Run(run.world, replace(run._engine.state.options, **options))
        try:
            model = scenario(own)
        except PacelineError as error:
            outcomes[name] = f"{type(error).__name__}: {error}"
        else:
            outcomes[name] = {key: whole(value).detach().clone() for key, value in model.state_dict().items()}
    return outcomes


def whole(value: Tensor) -> Tensor:
    """Return a tensor with the rows of all workers, where each holds some."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def outcomes(
    scenarios: Mapping[str, tuple[Scenario, dict[str, Any]]],
    strategy: str,
    workers: int,
    shards: int,
    **options: Any,
) -> dict[str, Outcome]:
    """Return what each came to; all workers must have come to the same."""
    first, *others = paceline.launch(
        work, scenarios, strategy=strategy, workers=workers, shards=shards, threads=1, **options
    )
    for name, outcome in first.items():
        for other in others:
            assert same(outcome, other[name]), (name, outcome, other[name])
    result: dict[str, Outcome] = first
    return result


def same(one: Outcome, other: Outcome) -> bool:
    """Return whether two outcomes are the same error, or the same weights to the bit."""
    if isinstance(one, str) or isinstance(other, str):
        return one == other
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
