"""The order of a step's passes, and of an evaluation's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from paceline.strategies.base import LossFunction, MetricsFunction, Rows, ShardWork, StepWork
from paceline.strategies.buffers.snapshot import BufferSnapshot
from paceline.strategies.precision import Precision
from paceline.task import Loss
from paceline.world import World, seeds


class Passes(Protocol):
    """What a schedule takes in hand: a model, batch by batch."""

    model: nn.Module
    precision: Precision
    world: World

    def open_step(self, work: StepWork) -> None:
        """Start a step with no gradients, wired up for what trains now."""

    def shard(self, work: ShardWork) -> Iterator[Any]:
        """Return the batches of one shard, on the device, with its random streams set."""

    def backward(self, loss: Loss) -> None:
        """Add one batch's gradients."""

    def placed(self, batch: Any) -> Any:
        """Return a batch on the device."""

    def take_hold(self) -> None:
        """Make step state and buffers for the parameters that are placed here now."""


class Schedule:
    """One shard after another, batch by batch."""

    whole_step_only: str | None = None
    """Why a loop of the user's own cannot take the passes itself; None where it can."""
    open_batch: Callable[[], None] | None = None
    """What prepares the model for the pass of one batch, where it needs that."""

    def train(self, passes: Passes, work: StepWork, loss: LossFunction) -> None:
        """Open a step and compute all its passes."""
        passes.open_step(work)
        model, precision = passes.model, passes.precision
        for shard in work.shards:
            for batch in passes.shard(shard):
                with precision.autocast():
                    value = loss(model, batch)
                passes.backward(value)

    def measure(self, passes: Passes, works: Iterable[StepWork], metrics: MetricsFunction) -> Rows:
        """Measure this worker's shards without touching gradients, buffers or random streams."""
        rows: Rows = {}
        with evaluating(passes.model) as restore:
            for work in works:
                self.open_work(work)
                for shard in work.shards:
                    seeds.seed_everything(shard.seed)
                    for part, batch in enumerate(shard.batches):
                        passes.world.status_page.batch()
                        if self.open_batch is not None:
                            self.open_batch()
                        with passes.precision.autocast():
                            measured = metrics(passes.model, passes.placed(batch))
                        rows[work.number, shard.index, part] = measured
                        restore()
                        self.close_batch(measured)
                self.close_work()
        return rows

    def open_work(self, work: StepWork) -> None:
        """Begin with some shards of an evaluation."""

    def close_batch(self, measured: Mapping[str, Any]) -> None:
        """End the pass of a batch that was measured."""

    def close_work(self) -> None:
        """End with the shards that were opened."""

    def abandon(self) -> None:
        """Release the group: it is broken."""


@contextmanager
def evaluating(model: nn.Module, running: Iterable[nn.Module] = ()) -> Iterator[Callable[[], None]]:
    """Measure in evaluation mode, without gradients; gives what puts buffers back after a batch.

    `running` are the modules that compute, where they are others than the model's.
    """
    apart = list(dict.fromkeys(running))
    buffers = BufferSnapshot(apart or list(model.modules()))
    # The whole model, too, where others run: a task may keep it, and it shares plain attributes with what runs.
    modes = [(module, module.training) for module in (*apart, *model.modules())]
    model.eval()
    for module in apart:
        module.training = False
    try:
        with torch.no_grad(), seeds.preserved():
            yield buffers.restore_moved
    finally:
        buffers.restore()
        for module, mode in modes:
            module.training = mode  # a layer that the user froze stays frozen
