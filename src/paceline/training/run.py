"""`Run`: the surface on which a training loop is written, paceline's own included.

def main(run: paceline.Run):
    model, optimizer = run.prepare(model, optimizer)
    for step in run.steps(dataset, batch_size=128, epochs=3):
        for batch in step:
            step.backward(loss_sum, weight)
        step.apply(max_grad_norm=1.0)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.checkpoint.best import Score
from paceline.data import Order, ShardedLoader
from paceline.recovery.membership import Membership
from paceline.strategies.base import MetricsFunction
from paceline.strategies.buffers.buffers import Rule
from paceline.strategies.in_turns.models import Models
from paceline.strategies.structure import Structure
from paceline.training.engine import Engine
from paceline.training.listeners import Listeners
from paceline.training.options import RunOptions
from paceline.training.several import (
    GivenModel,
    GivenScheduler,
    MakeModel,
    MakeOptimizer,
    MakeScheduler,
)
from paceline.training.step import Step
from paceline.training.user_loop.given import MODEL, NOTHING, OPTIMIZER, SCHEDULER, Given
from paceline.training.user_loop.prepared_loader import PreparedLoader
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

    @overload
    def prepare(
        self,
        model: nn.Module | MakeModel,
        optimizer: Optimizer | MakeOptimizer,
        /,
        *,
        scheduler: LRScheduler | MakeScheduler | None = None,
        buffers: Mapping[str, Rule] | None = None,
        structure: Structure | None = None,
    ) -> tuple[nn.Module, Optimizer]: ...

    @overload
    def prepare(
        self,
        model: GivenModel,
        optimizer: Mapping[str, Optimizer] | Mapping[str, MakeOptimizer],
        /,
        *,
        scheduler: Mapping[str, LRScheduler] | Mapping[str, MakeScheduler] | None = None,
        buffers: Mapping[str, Rule] | None = None,
        structure: Structure | None = None,
    ) -> tuple[Models, dict[str, Optimizer]]: ...

    @overload
    def prepare(
        self,
        *parts: Any,
        scheduler: GivenScheduler = None,
        buffers: Mapping[str, Rule] | None = None,
        structure: Structure | None = None,
    ) -> tuple[Any, ...]: ...

    def prepare(
        self,
        *parts: Any,
        scheduler: GivenScheduler = None,
        buffers: Mapping[str, Rule] | None = None,
        structure: Structure | None = None,
    ) -> tuple[Any, ...]:
        """Place the model, wire up its gradients, and take over the state of a run that is being resumed.

        Return what it was given, in that order, to go on with: model and optimizer (or functions that make them), DataLoaders
        whose passes are then epochs of steps, and a schedule, which is saved and handed on with the run and stays the loop's to
        step. One that is given as `scheduler=` is stepped by the run, after each update.

        Several models, optimizers and schedules are given by name, as dicts, and come back so:
        `run.steps(..., turns=("discriminator", "generator"))` trains them in turn.
        """
        given = Given(parts)
        preparation = self._engine.preparation
        model, optimizer = preparation.prepare(given[MODEL], given[OPTIMIZER], scheduler, buffers, structure)
        made = given[SCHEDULER]
        if made is not None:
            made = preparation.keep_schedule(made, optimizer, twice=scheduler is not None)
        data = (self._prepared(one) for one in given.data)
        return given.returned({MODEL: model, OPTIMIZER: optimizer, SCHEDULER: made, NOTHING: None}, data)

    def _prepared(self, data: Any) -> PreparedLoader:
        opened = data if isinstance(data, ShardedLoader) else self.loader(data)
        return PreparedLoader(opened, data, self.steps)

    def register(self, name: str, value: Any) -> Any:
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
        order: Order | None = None,
        turns: Sequence[str] = (),
        fresh_batches: bool = False,
    ) -> Iterator[Step]:
        """Yield one `Step` for each optimizer step, from where the run stands to the end of this call.

        A second call goes through other data, or the same once more: epochs and steps count from where it begins. A resumed run
        skips the calls that were done. An `order` says which samples an epoch reads: a function of (seed, epoch).
        Leaving the loop with `break` ends the call; all workers must do so at the same step.

        With several optimizers `turns` names the order in which they step: each global batch is given once for every turn, and
        `step.turn` says whose it is. With `fresh_batches` every turn has the next batch instead.
        """
        return self._engine.calls.steps(
            data.sharded if isinstance(data, PreparedLoader) else data,
            batch_size=batch_size,
            epochs=epochs,
            steps=steps,
            max_grad_norm=max_grad_norm,
            after_epoch=after_epoch,
            order=order,
            turns=turns,
            fresh_batches=fresh_batches,
        )

    def evaluate(
        self, data: Any, metrics: MetricsFunction, *, batch_size: int | None = None
    ) -> dict[str, float]:
        """Measure a data set exactly; metrics are as in `Task.metrics`. All workers must call it."""
        with self._engine.replay.own_turn():
            if isinstance(data, PreparedLoader):
                data = data.source if data.sharded.drops_rest else data.sharded
            return self._engine.measuring.evaluate(data, metrics, batch_size=batch_size)

    def log(self, values: Mapping[str, Any]) -> None:
        """Report values of the step that was applied last, in events.jsonl, the progress and every sink.

        A number is rank 0's, so log what all workers have alike. A `paceline.Mean` is the sum and the weight of this worker's
        batches of the step, and is combined over all of them: call it on every worker, in the body of the step behind
        `step.apply()`. A tensor of several sums or weights is added up exactly, to the same bits on any number of workers.
        """
        with self._engine.replay.own_turn():
            self._engine.reporting.log(values)

    def predict(
        self,
        data: Any,
        function: Callable[[nn.Module, Any], Tensor | Mapping[str, Tensor]],
        *,
        batch_size: int | None = None,
        out: str | Path | None = None,
    ) -> Any:
        """Return what `function(model, batch)` makes of every sample, in the order of the samples, on every worker.

        With `out`, a .safetensors or .npy file, the first worker writes it there a few steps at a time, and its number of rows is
        returned. All workers must call it, at the same place of the loop.
        """
        with self._engine.replay.own_turn():
            data = data.source if isinstance(data, PreparedLoader) else data
            return self._engine.predicting.predict(
                data, function, batch_size=batch_size, out=None if out is None else Path(out)
            )

    def compile(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function, usually the loss of (model, batch), that `--compile` compiles together with the model it calls.

        Without `--compile` it is the function itself. Where the run compiles, a model that is called outside of such a function
        is compiled without what the loop makes of its output.
        """
        state = self._engine.state

        def compiled(*args: Any, **kwargs: Any) -> Any:
            return state.replica.compiled(loss)(*args, **kwargs)

        return compiled if state.options.compile else loss

    def weights_sha256(self) -> str:
        """Return one number for all weights, wherever they are. All workers must call it, at the same place of the loop.

        They compare their weights, or put them together, and that takes all of them: one that calls it alone, to print the number
        on rank 0 say, is refused. Call it on all and print it on one.
        """
        with self._engine.replay.own_turn():
            return self._engine.measuring.weights_sha256()

    def save(self, *, best: float | Tensor | None = None, mode: Literal["max", "min"] | None = None) -> None:
        """Write a checkpoint of where the run stands. All workers must call it, at the same place of the loop.

        With `best=accuracy, mode="max"` (or `best=loss, mode="min"`) it is written only if it is the best so far, and is kept
        apart from the newest; `--keep-best K` keeps the K best.

        In the body of a step, and in `after_epoch`, it is written when that ends: what the body does behind this belongs to it.
        With --save-async training goes on as soon as the state is copied.
        """
        with self._engine.replay.own_turn():
            score = None if best is None and mode is None else Score.given(best, mode)
            self._engine.saving.save_on_request(score)

    def stop(self, when: bool = True) -> bool:
        """End this call of `run.steps` behind the present step, if some worker says so; return whether it ends.

        All workers must call it, at the same place of the loop; what one of them has seen then ends the call on all, behind the
        same step and with a checkpoint. Between two calls it ends nothing, and tells all workers the same.
        """
        with self._engine.replay.own_turn():
            return self._engine.measuring.stop(when=bool(when))

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
