"""Trains models of several kinds in one launch, each in a run of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paceline

TrainOne = Callable[[paceline.Run, str], Any]


def train_each(run: paceline.Run, train_one: TrainOne, kinds: list[str]) -> dict[str, Any]:
    """Train a model of each kind, one after the other."""
    made: dict[str, Any] = {}
    for kind in kinds:
        own = paceline.Run(run.world, run._engine.state.options)
        made[kind] = train_one(own, kind)
        own._engine.state.replica.abandon()
    return made


def launched(
    train_one: TrainOne,
    strategy: str,
    workers: int,
    kinds: list[str],
    *,
    job: Any = train_each,
    **options: Any,
) -> dict[str, Any]:
    """Return what the first worker has for each kind."""
    given = {"shards": 4, "threads": 1, "device": "cpu", "elastic": False, **options}
    made = paceline.launch(job, train_one, kinds, strategy=strategy, workers=workers, **given)
    return made[0]  # type: ignore[no-any-return]
