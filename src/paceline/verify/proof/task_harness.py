"""A task made ready to be watched: its data, its model as it was made, and its replica."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.data import Subset

from paceline import strategies
from paceline.data import ShardedLoader
from paceline.data.loaders import is_loader
from paceline.strategies.replica import Replica
from paceline.training.horizon import make_schedule
from paceline.training.options import RunOptions
from paceline.training.reference import load_task
from paceline.training.run import Run, engine_of
from paceline.training.spec import TrainSpec
from paceline.training.strategy_inputs import structure_of
from paceline.verify.proof.digests import of_named
from paceline.verify.proof.record import Digests
from paceline.world import seeds


class TaskHarness:
    """What `paceline train` would train, opened in the same order, with the same seeds."""

    def __init__(self, run: Run, spec: TrainSpec, epochs: int | None = None) -> None:
        self.run, self.spec = run, spec
        self.task = load_task(spec.task, spec.settings)
        self._engine = engine_of(run)
        self._engine.begin_task(self.task, spec)
        self.epochs = epochs if epochs is not None else self.task.epochs
        self.max_grad_norm = spec.max_grad_norm if spec.max_grad_norm is not None else self.task.max_grad_norm
        self.batch_size = spec.batch_size if spec.batch_size is not None else self.task.batch_size
        self.dataset = self.task.train_data()
        self.feed = self.open_feed()
        seeds.seed_everything(seeds.derive(self.options.seed, "model"))
        self.model: nn.Module = self.task.model()
        self.made: Digests = of_named(self.model.state_dict().items())

    @property
    def options(self) -> RunOptions:
        """How the run is done."""
        return self._engine.state.options

    def open_feed(self, **loading: Any) -> ShardedLoader:
        """Open the training data once more from its beginning."""
        return self.run.feed(
            self.dataset,
            batch_size=self.batch_size,
            **{"collate": self.task.collate, "worker_init_fn": self.task.worker_init_fn, **loading},
        )

    def prepare(self) -> Replica:
        """Hand model, optimizer and schedule to the strategy."""
        horizon = self._horizon()
        # Several processes make it themselves, each as much of it as it holds; one takes the model that is watched.
        several = strategies.entry(self.options.strategy).processes is None
        return self._engine.preparation.prepare_replica(
            self.task.model if several else self.model,
            self.task.optimizer,
            lambda optimizer: make_schedule(
                self.task, optimizer, horizon, lambda: self._engine.state.position.number
            ),
            self.task.buffers(),
            structure_of(self.task),
        )

    def measure(self) -> tuple[dict[str, float], str]:
        """Evaluate as `paceline train` does at the end, on a few batches; gives what could not be evaluated and why."""
        held_out = self.task.eval_data()
        if held_out is None:
            return {}, ""  # nor does train evaluate then
        if not is_loader(held_out):
            if not hasattr(held_out, "__getitem__") or not hasattr(held_out, "__len__"):
                return {}, "evaluation: the task's eval_data() is a stream"
            # One batch that is not a whole one, so that shares are unequal.
            few = min(len(held_out), 2 * self.batch_size + self.batch_size // 2 + 1)
            held_out = Subset(held_out, range(few))
        feed = self.run.feed(
            held_out,
            batch_size=None if is_loader(held_out) else self.batch_size,
            shuffle=False,
            collate=self.task.collate,
            worker_init_fn=self.task.worker_init_fn,
        )
        try:
            return self.run.evaluate(feed, self.task.metrics), ""
        finally:
            feed.close()

    def _horizon(self) -> int | None:
        if self.spec.horizon is not None:
            return self.spec.horizon
        per_epoch = self.feed.steps_per_epoch
        whole = None if per_epoch is None else self.epochs * per_epoch
        return self.spec.steps if whole is None else max(whole, self.spec.steps or 0)
