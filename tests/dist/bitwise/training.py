"""Trains many cases in one launch and gives the bits of everything that a run reports or keeps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from paceline import Run, Task, launch
from paceline.checkpoint import weights_sha256
from tests.dist.bitwise import tasks

STEPS = 7
"""More than an epoch of 61 samples in batches of 19 or 13: the short batch at its end is among them."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training, but for who does it."""

    task: str
    shards: int
    optimizer: str = "adamw"
    batch_size: int = 19
    max_grad_norm: float | None = None
    micro_batch: int | None = None
    precision: str = "fp32"


def bits(run: Run, case: Case) -> dict[str, Any]:
    """Train a case on this run's workers."""
    options = replace(
        run._engine.state.options,
        shards=case.shards,
        micro_batch=case.micro_batch,
        precision=case.precision,
        seed=5,
    )
    mine = Run(run.world, options)
    task: Task = getattr(tasks, case.task)(case.optimizer)
    replica = mine._engine.preparation.prepare_replica(task.model(), task.optimizer)
    reported = []
    for step in mine.steps(
        task.train_data(), batch_size=case.batch_size, steps=STEPS, max_grad_norm=case.max_grad_norm
    ):
        result = step.compute(task.loss)
        reported.append((result.loss, result.weight, result.gradient_norm))
    state = replica.state()
    kept = {
        f"{name}.{key}": value
        for name, entry in state["optimizer"]["state"].items()
        for key, value in entry.items()
        if isinstance(value, Tensor)
    }
    return {
        "reported": reported,
        "weights": weights_sha256(state["model"]),
        "optimizer": weights_sha256(kept),
    }


def all_bits(run: Run, cases: list[Case]) -> list[dict[str, Any]]:
    """Train every case in turn."""
    return [bits(run, case) for case in cases]


def train(cases: list[Case], **options: Any) -> list[dict[str, Any]]:
    """Train cases on launched workers; every worker must end with the same."""
    by_rank = launch(all_bits, cases, threads=1, device="cpu", **options)
    assert all(other == by_rank[0] for other in by_rank[1:])
    first: list[dict[str, Any]] = by_rank[0]
    return first
