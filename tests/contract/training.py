"""Trains jobs with real workers and brings the weights home."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import paceline
from paceline.training import trainer
from tests.contract.jobs import Job
from tests.contract.strategies import SHARDS


@dataclass(frozen=True)
class Trained:
    """What came of a training."""

    weights: dict[str, Tensor]
    result: dict[str, Any]
    learning_rate: float


def work(run: paceline.Run, jobs: Mapping[str, Job]) -> dict[str, Trained]:
    """Train one job after the other in the same world, each in a run of its own."""
    made = {}
    for name, job in jobs.items():
        own = paceline.Run(run.world, replace(run._engine.state.options, **job.options))
        result = trainer.main(own, job.spec())
        weights = {key: tensor.clone() for key, tensor in own._engine.state.replica.state()["model"].items()}
        made[name] = Trained(
            weights, result, float(own._engine.state.replica.optimizer.param_groups[0]["lr"])
        )
    return made


def launch(jobs: Mapping[str, Job], asked: Mapping[str, Any]) -> tuple[dict[str, Trained], ...]:
    """Train on workers of paceline's own."""
    return paceline.launch(work, jobs, **asked)


launchers = [launch]
"""The last one starts the workers: `over_mpi` adds its own."""


def train(
    jobs: Mapping[str, Job], strategy: str = "single", workers: int = 1, **options: Any
) -> dict[str, Trained]:
    """Train jobs in one launch; every worker must end with the same weights."""
    # One thread each: how many threads share a matrix product is one of the things bits depend on.
    asked = {"workers": workers, "strategy": strategy, "shards": SHARDS, "threads": 1, **options}
    first, *others = launchers[-1](jobs, asked)
    for other in others:
        for name, trained in first.items():
            assert all(torch.equal(trained.weights[key], other[name].weights[key]) for key in trained.weights)
    return first
