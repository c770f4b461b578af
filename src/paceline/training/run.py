"""`Run`: the surface on which a training loop is written, paceline's own included.

def main(run: paceline.Run):
    model, optimizer = run.prepare(model, optimizer)
    for step in run.steps(dataset, batch_size=128, epochs=3):
        for batch in step:
            step.backward(loss_sum, weight)
        step.apply(max_grad_norm=1.0)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.data import ShardedLoader
from paceline.recovery.membership import Membership
from paceline.strategies.base import MetricsFunction
from paceline.strategies.buffers.buffers import Rule
from paceline.strategies.structure import Structure
from paceline.training.engine import Engine
from paceline.training.listeners import Listeners
from paceline.training.options import RunOptions
from paceline.training.step import Step
from paceline.training.strategy_inputs import MakeModel, MakeOptimizer, MakeScheduler
from paceline.world import World


class Run:
    """A run as the loop of one worker sees it."""

    def __init__(
        self,
        world: World,
        options: RunOptions,
        membership: Membership | None = None,
        listeners: Listeners | None = None,
    ) -> None:
        self._engine = Engine(world, options, membership, listeners)

    def prepare(
        self,
        model: nn.Module | MakeModel,
        optimizer: Optimizer | MakeOptimizer,
        scheduler: LRScheduler | MakeScheduler | None = None,
        buffers: Mapping[str, Rule] | None = None,
        structure: Structure | None = None,
    ) -> tuple[nn.Module, Optimizer]:
        """Place the model, wire up its gradients, and take over the state of a run that is being resumed.

        Return model and optimizer, to go on with; a schedule is stepped by the run.
        """
        return self._engine.preparation.prepare(model, optimizer, scheduler, buffers, structure)

    def register_state(self, name: str, value: Any) -> Any:
        """Save an object's state with the run, and return the object: a moving average of the weights, the best score so far.

        It has `state_dict` and `load_state_dict`, or is a dict; what it holds are tensors, numbers, strings, lists and dicts,
        the same on all workers. Call it on every worker before `run.steps`: a resumed run, and a worker that joins, take it over.
        """
        return self._engine.preparation.register(name, value)

    def loader(self, data: Any, *, batch_size: int | None = None, **loading: Any) -> ShardedLoader:
        """Open this worker's share of a data set, or of a DataLoader's; the batch is the GLOBAL one (32 where nobody says)."""
        return self._engine.loaders.open(data, batch_size=batch_size, **loading)

    def steps(
        self,
        data: Any,
        *,
        batch_size: int | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        max_grad_norm: float | None = None,
        after_epoch: Callable[[int], None] | None = None,
    ) -> Iterator[Step]:
        """Yield one `Step` for each optimizer step, from where the run stands to the end of this call.

        A second call goes through other data, or the same once more: epochs and steps count from where it begins. A resumed run
        skips the calls that were done. Leaving the loop with `break` ends the call; all workers must do so at the same step.
        """
        return self._engine.calls.steps(
            data,
            batch_size=batch_size,
            epochs=epochs,
            steps=steps,
            max_grad_norm=max_grad_norm,
            after_epoch=after_epoch,
        )

    def evaluate(
        self, data: Any, metrics: MetricsFunction, *, batch_size: int | None = None
    ) -> dict[str, float]:
        """Measure a data set exactly; a metric is a sum and a weight, as in `Task.metrics`. All workers must call it."""
        with self._engine.replay.own_turn():
            return self._engine.measuring.evaluate(data, metrics, batch_size=batch_size)

    def weights_sha256(self) -> str:
        """Return one number for all weights, wherever they are. All workers must call it, at the same place of the loop.

        They compare their weights, or put them together, and that takes all of them: one that calls it alone, to print the number
        on rank 0 say, is refused. Call it on all and print it on one.
        """
        with self._engine.replay.own_turn():
            return self._engine.measuring.weights_sha256()

    def save(self) -> None:
        """Write a checkpoint of where the run stands. All workers must call it, at the same place of the loop.

        In the body of a step, and in `after_epoch`, it is written when that ends: what the body does behind this belongs to it.
        With --save-async training goes on as soon as the state is copied.
        """
        with self._engine.replay.own_turn():
            self._engine.saving.save_on_request()

    @property
    def world(self) -> World:
        """Whom this worker works with: rank and size; another one after each change of the group."""
        return self._engine.state.world

    @property
    def replaying(self) -> bool:
        """Whether the function goes once more through code that comes before the place where the run goes on.

        In a resumed run, and in a worker that joins, calls of `run.steps` that are over yield no step, and the weights behind
        them are not those of then. Save and print behind a call only where this is False.
        """
        return self._engine.replay.in_progress


def engine_of(run: Run) -> Engine:
    """Return the engine of a run: for whoever starts, trains or verifies it, not for a loop."""
    return run._engine  # noqa: SLF001
