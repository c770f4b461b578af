"""What a run says of itself when steps begin: to those who listen, and to its records."""

from __future__ import annotations

import math
from collections.abc import Callable

from paceline.data import ShardedLoader
from paceline.observe import RunStarted
from paceline.records.receipt import Start
from paceline.recovery.position import Position
from paceline.training.recorder import describe_start
from paceline.training.state import RunState


def announcement(state: RunState, feed: ShardedLoader, epochs: int | None, last: float) -> RunStarted:
    """Return the event that steps begin."""
    world, options = state.world, state.options
    return RunStarted(
        task=state.name,
        strategy=options.strategy,
        workers=state.workers,
        shards=options.total_shards,
        exactness=str(state.exactness),
        device=str(world.device),
        backend=world.backend,
        parameters=state.parameters,
        samples=feed.samples,
        batch_size=feed.batch_size,
        total_steps=None if math.isinf(last) else int(last),
        epochs=epochs,
        start_step=state.position.number,
        out=str(options.out or ""),
        shards_from=options.shards_from,
        transport=state.transport,
    )


def description(state: RunState, position: Position) -> tuple[str, int, int, Callable[[], Start]]:
    """Return what the records of steps from `position` on are begun with."""
    data, max_grad_norm = state.training or state.others_training or (None, None)
    if data is None:
        raise RuntimeError("records are begun with the steps")
    if position.step == data.steps_per_epoch:
        position = position.next_epoch()

    def describe() -> Start:
        return describe_start(
            state.options,
            state.world,
            position,
            data,
            exactness=str(state.exactness),
            max_grad_norm=max_grad_norm,
            transport=state.transport,
            about=state.about,
        )

    return state.name, state.options.seed, data.batch_size, describe
