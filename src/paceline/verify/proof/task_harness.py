"""The trainer of `paceline train`, opened and prepared as it is there; its steps are taken by whoever watches it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.utils.data import Subset

from paceline.data import ShardedLoader
from paceline.data.loaders import is_loader
from paceline.observe import Note
from paceline.strategies.epoch_schedules import OnMetric
from paceline.strategies.replica import Replica
from paceline.training.options import RunOptions
from paceline.training.reference import make_task
from paceline.training.run import Run, engine_of
from paceline.training.spec import TrainSpec
from paceline.training.step import Step
from paceline.training.trainer import Trainer
from paceline.world import seeds


class TaskHarness(Trainer):
    """A trainer whose schedule may be laid out for `epochs`, though it ends after the steps of its spec."""

    def __init__(self, run: Run, spec: TrainSpec, epochs: int | None = None) -> None:
        super().__init__(make_task(spec, lambda text: engine_of(run).state.emit(Note(text=text))), spec, run)
        if epochs is not None and spec.horizon is None:
            self.epochs = epochs
            self.horizon = self._planned()

    @property
    def options(self) -> RunOptions:
        """The options of the run, with what the task says itself."""
        return self._state.options

    def open_loader(self, **loading: Any) -> ShardedLoader:
        """Open the training data once more from its beginning."""
        loading |= {"order": self.task.order(), **self._loading}
        return self.run.loader(self.dataset, batch_size=self.batch_size, **loading)

    def make_model(self) -> nn.Module:
        """Make the model once more, as it is made for the strategy."""
        seeds.seed_everything(seeds.derive(self.options.seed, "model"))
        return self._model()

    def prepared(self) -> Replica:
        """Prepare model, optimizer and schedule with the strategy, and return the replica."""
        self.prepare()
        return self._state.replica

    def steps_to(self, last: int | None) -> Iterator[Step]:
        """Yield the steps up to `last`; a schedule that goes by a metric has it measured between two epochs."""
        measures = isinstance(self._state.replica.scheduler, OnMetric)
        return self.run.steps(
            self.loader,
            steps=last,
            max_grad_norm=self.max_grad_norm,
            after_epoch=(lambda epoch: self._measure(epoch, due=False)) if measures else None,
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
        loader = self._opened(held_out)
        try:
            return self.run.evaluate(loader, self.task.metrics), ""
        finally:
            loader.close()
