"""Many small trainings, one after the other, in one group of workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

import paceline
from paceline import strategies
from paceline.data import ShardedLoader
from paceline.strategies.base import Exactness, ShardWork, StepWork, StrategyInputs
from paceline.strategies.precision import Precision
from paceline.strategies.replica import Replica
from paceline.strategies.tuning import Tuning
from paceline.training.strategy_inputs import structure_of
from paceline.world import World, seeds

STEPS = 3


class Interrupted(str):
    """What ended a training on a worker that waited for another one, which had refused."""

    __slots__ = ()


@contextmanager
def prepared(
    run: paceline.Run,
    name: str,
    task: Any,
    strategy: str,
    shards: int,
    tuning: Tuning,
    make_scheduler: Callable[[Optimizer], Any] = lambda _: None,
) -> Iterator[tuple[Replica, ShardedLoader, World]]:
    """Prepare a task under a strategy, and let go of it at the end; `name` is that of no other training of this group."""
    world = run.world
    if world.store is not None:  # servers meet their trainers there anew
        world = replace(world, store=dist.PrefixStore(name, world.store))

    def make() -> nn.Module:
        seeds.seed_everything(7)
        made: nn.Module = task.model()
        return made

    parts = StrategyInputs(
        make_model=make,
        make_optimizer=task.optimizer,
        make_scheduler=make_scheduler,
        precision=Precision("fp32", world.device),
        shards=shards,
        exactness=Exactness.BITWISE,
        find_unused_parameters=task.find_unused_parameters,
        structure=structure_of(task),
        tuning=tuning,
        can_rebuild=True,
    )
    replica = strategies.load(strategy).prepare(parts, world)
    try:
        yield replica, run.loader(task.train_data(), batch_size=task.batch_size), world
    finally:
        replica.abandon()


def steps_of(loader: ShardedLoader) -> Iterator[StepWork]:
    """Yield the work of the first steps."""
    for data in islice(loader.epoch(0), STEPS):
        shards = [
            ShardWork(one.index, seeds.derive(0, "shard", data.step, one.index), one.samples, one.batches)
            for one in data.shards
        ]
        yield StepWork(data.step, data.size, shards)


def launched(
    train: Callable[..., dict[str, Any]],
    strategy: str,
    workers: int,
    shards: int,
    tuning: Tuning | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Return what is said of each training by the first worker that came to its end: it may be the second that refuses first."""
    workers_say = paceline.launch(
        train,
        strategy,
        shards,
        tuning or Tuning(),
        strategy=strategy,
        workers=workers,
        shards=shards,
        threads=1,
        device="cpu",
        **options,
    )
    return {
        name: next((one[name] for one in workers_say if not isinstance(one[name], Interrupted)), said)
        for name, said in workers_say[0].items()
    }
