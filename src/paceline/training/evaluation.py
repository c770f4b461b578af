"""Exact evaluation: every sample once, on any number of workers, summed in one fixed order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

import torch

from paceline.data import ShardedLoader
from paceline.data.copying import copied
from paceline.data.resident import gathered
from paceline.declared import Collected
from paceline.errors import InputError
from paceline.strategies.base import MetricsFunction, Rows, ShardWork, StepWork
from paceline.strategies.in_turns.outside import own_model
from paceline.strategies.replica import Replica
from paceline.task import Mean, as_float, fault_of
from paceline.training.checks.same_stream import EVALUATION, read_alike
from paceline.training.merging import Merging, check_state
from paceline.world import World, all_gather_object, fault_points, seeds

_WANTS_GRADIENTS = "does not require grad and does not have a grad_fn"
WINDOW = 64
"""Steps after which states are merged, so that not those of all batches are held."""


def evaluate(
    loader: ShardedLoader, metrics: MetricsFunction, replica: Replica, world: World, seed: int
) -> dict[str, float]:
    """Measure a whole data set and return each metric, exact: means, merged states, functions of all values."""
    means: Rows = {}
    merging = Merging()
    for rows in measured(loader, _checked(metrics), replica, world, seed, WINDOW):
        merging.add(rows)
        means |= {
            key: {name: value for name, value in row.items() if isinstance(value, Mean)}
            for key, row in rows.items()
        }
    return combine(means, world) | merging.results(world)


def measured(
    loader: ShardedLoader,
    function: Callable[[Any, Any], Any],
    replica: Replica,
    world: World,
    seed: int,
    window: int,
) -> Iterator[Rows]:
    """Call a function on every batch of this worker's; yield what it returned, some steps at a time, on all workers alike."""
    works = _works(loader, world, seed)
    for first in works:
        yield replica.evaluate(chain([first], islice(works, window - 1)), function)


def _works(loader: ShardedLoader, world: World, seed: int) -> Iterator[StepWork]:
    for data in read_alike(loader, world, EVALUATION, 0):
        fault_points.hit(fault_points.EVALUATION)
        yield StepWork(
            number=data.step,
            size=data.size,
            shards=[
                ShardWork(
                    shard.index,
                    seeds.derive(seed, "evaluate", data.step, shard.index),
                    shard.samples,
                    gathered(shard.batches),
                )
                for shard in data.shards
            ],
        )


def combine(rows: Rows, world: World) -> dict[str, float]:
    """Add up what all workers measured, in the order of (step, shard, batch): the same bits for any of them."""
    mine: dict[str, Any] = {
        name: [
            [*key, as_float(row[name].total), as_float(row[name].weight)]
            for key, row in rows.items()
            if name in row
        ]
        for name in sorted({name for row in rows.values() for name in row})
    }
    gathered = all_gather_object(world.comm, mine)
    result: dict[str, float] = {}
    for name in sorted({name for part in gathered for name in part}):
        # Workers beside each other in a mesh measure the same batches.
        table = [
            row
            for _, row in sorted(
                {tuple(row[:3]): row for part in gathered for row in part.get(name, [])}.items()
            )
        ]
        total, weight = torch.tensor([row[-2:] for row in table], dtype=torch.float64).sum(0).tolist()
        # Nothing was counted: no number is the mean of that, as for the recall of a class that never comes.
        result[name] = total / weight if weight else math.nan
    return result


def _checked(metrics: MetricsFunction) -> MetricsFunction:
    def measure(model: Any, batch: Any) -> dict[str, Any]:
        try:
            values = metrics(own_model(model), batch)
        except RuntimeError as error:
            if _WANTS_GRADIENTS in str(error):
                raise InputError(
                    "what was measured took gradients (torch.autograd.grad, backward), and evaluations run without them; "
                    "that of a task calls loss() where it has no metrics(). Write metrics() without them, or call "
                    "the model and take them in a block of `with torch.enable_grad():`."
                ) from error
            raise
        if not isinstance(values, dict):
            raise InputError(
                "metrics() must return a dict of paceline.Mean(total, weight), so that the mean over all workers is exact; "
                f"it returned {values!r:.80}."
            )
        for name, value in values.items():
            if not isinstance(name, str):
                raise InputError(f"metrics() returned a metric called {name!r:.80}. Give it a name, a text.")
            if isinstance(value, Mean):
                _check_mean(name, value)
            elif not isinstance(value, Collected):
                check_state(name, value)
        # Copies: the next batch's may be counted, or computed by the model, in the same memory.
        return {
            name: value if isinstance(value, Collected) else copied(value) for name, value in values.items()
        }

    return measure


def _check_mean(name: str, value: Mean) -> None:
    for part, number in (("total", value.total), ("weight", value.weight)):
        if fault := fault_of(number):
            raise InputError(
                f"the {part} of the metric {name} {fault}; it must be one number: Mean(values.sum(), len(values))."
            )
