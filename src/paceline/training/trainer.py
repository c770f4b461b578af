"""Trains a Task: the loop of `paceline train`, written on `Run` like anybody's."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.checkpoint.best import Score, best_of
from paceline.data import ShardedLoader
from paceline.data.loaders import is_loader
from paceline.data.parts import in_order
from paceline.errors import InputError
from paceline.observe import Evaluated, Note, RunFinished
from paceline.recovery.agreement import WentBackError
from paceline.task import Task
from paceline.training.averaging import check_averages, keep_average
from paceline.training.checks.before_first_step import check_shards, near_names
from paceline.training.checks.counters import Modes
from paceline.training.checks.declared_values import DeclaredValues
from paceline.training.description import about_task
from paceline.training.hooks import EPOCH, EVAL, STEP, Hooks
from paceline.training.horizon import choose_horizon, is_forgotten, make_schedule, refuse_forgotten
from paceline.training.judging import NAME, Judge
from paceline.training.options import Every
from paceline.training.reference import make_task
from paceline.training.run import Run, engine_of
from paceline.training.spec import TrainSpec
from paceline.training.strategy_inputs import structure_of
from paceline.training.training_mode import TrainingMode


def main(run: Run, spec: TrainSpec) -> dict[str, Any]:
    """Train a task from where the run stands to its end, and give the result."""
    started = time.perf_counter()
    state = engine_of(run).state
    task = make_task(spec, lambda text: state.emit(Note(text=text)))
    check_shards(task.shards, state.options)
    result = Trainer(task, spec, run).train()
    result["wall_s"] = round(time.perf_counter() - started, 3)
    state.emit(RunFinished(result=result))
    return result


class Trainer:
    """A task on its way: data, replica and metrics."""

    def __init__(self, task: Task, spec: TrainSpec, run: Run) -> None:
        self.task, self.spec, self.run = task, spec, run
        self._engine = engine_of(run)
        self._declared = DeclaredValues(task)
        self._engine.begin_task(task, spec)
        self._state = self._engine.state
        self.steps = spec.steps
        self.epochs = spec.epochs if spec.epochs is not None else task.epochs
        self.max_grad_norm = spec.max_grad_norm if spec.max_grad_norm is not None else task.max_grad_norm
        self.batch_size = spec.batch_size if spec.batch_size is not None else task.batch_size
        self._modes = Modes()
        self._training_mode, self._came_evaluating = TrainingMode(), ""
        self._hooks, self._judge = Hooks(task, self._state, self._declared), Judge(task)
        self._evaluates = _due(task, spec)
        self._state.average = task.average
        self._loading = loading = {"collate": task.collate, "worker_init_fn": task.worker_init_fn}
        self.dataset = task.train_data()
        self.loader = run.loader(self.dataset, batch_size=self.batch_size, order=task.order(), **loading)
        held_out = task.eval_data()
        self.eval_loader = None if held_out is None else self._opened(held_out)
        saved = self._engine.preparation.saved_meta()
        self.horizon = choose_horizon(self._planned(), spec.horizon, saved)
        self._forgotten = is_forgotten(spec.horizon, saved)

    def train(self) -> dict[str, Any]:
        """Take every step, measure after every epoch and at the end."""
        self._engine.saving.then = self._hooks.checkpoint
        for text in near_names(self.task):
            self._state.emit(Note(text=text))
        self.prepare()
        while True:
            self._steps()
            try:
                self._measure(self._state.position.epoch, due=False)
                predicted = self._predict()
                return {**self._result(), **predicted}
            except WentBackError:
                continue

    def _steps(self) -> None:
        state, epochs, judge = self._state, None if self.steps is not None else self.epochs, self._judge
        tells, evaluates = STEP in self._hooks.written, self._evaluates.steps is not None
        for step in self._engine.calls.steps(
            self.loader,
            epochs=epochs,
            steps=self.steps,
            max_grad_norm=self.max_grad_norm,
            after_epoch=self._after_epoch,
            stops=None if judge.stopping is None else lambda: judge.stops,
        ):
            result = step.compute(self.task.loss)
            self._declared.check()
            if result.again:
                continue
            text = self._modes.note_of_change(self.task, state.replica.placement.model, step.number)
            if text is not None:
                state.emit(Note(text=text))
            if tells:
                self._hooks.step(result, step.learning_rate)
            if evaluates and self._evaluates.after_step(state.position.number):
                with suppress(WentBackError):
                    self._measure(state.position.epoch + 1, due=True)

    def _after_epoch(self, epoch: int) -> None:
        """Evaluate where that is due, and tell the task; `epoch` counts those that are over."""
        if self._evaluates.after_epoch(epoch):
            self._measure(epoch, due=True)
        self._hooks.epoch(epoch - 1, self._judge.last)

    def prepare(self) -> None:
        """Make the model and hand it to the strategy."""
        task, horizon = self.task, self.horizon
        self._state.about = about_task(task, self.spec, horizon)
        self._register()
        replica = self._engine.preparation.prepare_replica(
            self._model, self._optimizer, self._schedule, task.buffers(), structure_of(task)
        )
        if self._came_evaluating:
            self._state.emit(Note(text=self._came_evaluating))
        self._declared.check()
        check_averages(task.average, replica)
        self._engine.loop.registered.leave(NAME)
        last = self._last()
        if replica.scheduler is not None and horizon is not None and last is not None and last > horizon:
            text = f"the schedule of this run was laid out for {horizon} steps; from there to step {last} it stays at its end"
            self._state.emit(Note(text=text))

    def _register(self) -> None:
        """Have the run keep what the task declares as its state, and what follows from its evaluations."""
        task, registered = self.task, self._engine.loop.registered
        declared: Any = task.state()
        if not isinstance(declared, Mapping):
            raise InputError(
                f"{type(task).__name__}.state() must return a dict of names to objects, not {declared!r:.60}."
            )
        for name, value in declared.items():
            registered.register(str(name), value)
        if self.task.early_stopping or self.task.keep_best or self._hooks.written & {EVAL, EPOCH}:
            registered.register(NAME, self._judge)

    def _model(self) -> nn.Module:
        made: Any = self.task.model()
        if isinstance(made, nn.Module):
            self._training_mode.enter(made)
        return made  # type: ignore[no-any-return]  # what is none is refused where it is looked at

    def _optimizer(self, model: nn.Module) -> Optimizer:
        made, average = self.task.optimizer(model), self.task.average
        if isinstance(made, Optimizer):
            self._came_evaluating = self._training_mode.note(model, made)
        return made if average is None else keep_average(made, average, lambda: self._state.position.number)

    def _schedule(self, optimizer: Optimizer) -> LRScheduler | None:
        made = make_schedule(self.task, optimizer, self.horizon, lambda: self._state.position.number)
        if made is not None and self._forgotten:
            refuse_forgotten(self.horizon)
        return made

    def _planned(self) -> int | None:
        """Return the number of steps a schedule is laid out for: the whole run's, wherever --steps ends it."""
        per_epoch = self.loader.steps_per_epoch
        whole = None if per_epoch is None else self.epochs * per_epoch
        return self.steps if whole is None else max(whole, self.steps or 0)

    def _last(self) -> int | None:
        """Return the step at which this run ends, if that is known."""
        per_epoch = self.loader.steps_per_epoch
        if self.steps is not None or per_epoch is None:
            return self.steps
        return self.epochs * per_epoch

    def _measure(self, epoch: int, *, due: bool) -> None:
        """Evaluate, unless that was done here; where it was `due`, act on it. `epoch` is the one after that of the last step."""
        if self.eval_loader is None:
            return
        number, measured = self._state.position.number, self._state.measured
        if measured is None or measured[0] != number:
            started = time.perf_counter()
            metrics = self.run.evaluate(self.eval_loader, self.task.metrics)
            self._state.measured = number, metrics
            self._state.emit(
                Evaluated(
                    step=number,
                    epoch=epoch - 1,
                    metrics=metrics,
                    samples=self.eval_loader.samples or 0,
                    seconds=time.perf_counter() - started,
                )
            )
        if due and self._state.measured is not None:
            self._judge_evaluation(epoch, self._state.measured[1])

    def _judge_evaluation(self, epoch: int, metrics: dict[str, float]) -> None:
        info = self._judge.judge(self._state.position.number, epoch - 1, metrics)
        if info is None:
            return
        self._hooks.evaluation(info)
        if self._judge.stops:
            rule = self._judge.stopping
            self._state.emit(Note(text=f"stopped early at step {info.step}: {rule} did not become better"))
        kept = self.task.keep_best
        if kept is not None and self._engine.saving.saver is not None:
            score = Score(metrics[kept.metric], kept.mode, kept.metric)
            self._engine.saving.save_on_request(score)

    def _predict(self) -> dict[str, Any]:
        """Write the predictions that were asked for, once the run is at its end."""
        if self.spec.predict is None:
            return {}
        data = self.task.predict_data()
        if data is None:
            raise InputError("--predict needs data: the task has no predict_data() and no eval_data().")
        rows = self.run.predict(self._opened(in_order(data)), self.task.predict, out=self.spec.predict)
        return {"predictions": {"rows": rows, "path": str(self.spec.predict)}}

    def _opened(self, data: Any) -> ShardedLoader:
        """Open what is measured, every sample of it, in order."""
        batch = (
            None if is_loader(data) else self.batch_size
        )  # no metric depends on it: a DataLoader may have its own
        return self._engine.loaders.open(
            data, batch_size=batch, every_sample=True, shuffle=False, **self._loading
        )

    def _best(self) -> dict[str, Any] | None:
        """Return which evaluation was best, and where its checkpoint lies."""
        best, out = self._judge.best(), self._state.options.out
        if best is None:
            return None
        kept = best_of(out) if out is not None and self._state.world.is_first else []
        return {**best, "path": next((str(one.path) for one in kept if one.step == best["step"]), None)}

    def _samples(self) -> int:
        """Return the samples of the whole run, what came before a resume included."""
        whole, position = self.loader.samples, self._state.position
        if whole is None:
            return self._engine.saving.samples
        return position.epoch * whole + min(position.step * self.batch_size, whole)

    def _result(self) -> dict[str, Any]:
        state, options, journal = self._state, self._state.options, self._engine.journal
        return {
            "task": state.name,
            "strategy": options.strategy,
            "workers": state.present_workers,
            "workers_at_start": state.workers,
            "shards": options.total_shards,
            "shards_from": options.shards_from,
            "transport": state.transport,
            "exactness": str(state.exactness),
            "steps": state.position.number,
            "samples": self._samples(),
            "new_samples": journal.samples,
            "loss": None if math.isnan(journal.loss) else journal.loss,
            "metrics": {} if state.measured is None else state.measured[1],
            "best": self._best(),
            "stopped_early": self._judge.stops,
            "weights_sha256": self.run.weights_sha256(),
            "step_ms_p50": round(journal.milliseconds(0.5), 4),
            "step_ms_p95": round(journal.milliseconds(0.95), 4),
            "restarts": 0,
            "recoveries": state.recoveries,
            "parameters": state.parameters,
            "batch_size": self.batch_size,
            "horizon": None if state.replica.scheduler is None else self.horizon,
            "seed": options.seed,
            "out": str(options.out or ""),
        }


def _due(task: Task, spec: TrainSpec) -> Every:
    """Return when the task is evaluated on its way: as the command line says, or the task; else after every epoch."""
    if spec.eval_every is not None:
        return Every.parse(spec.eval_every, "--eval-every")
    if task.eval_every is not None:
        return Every.parse(task.eval_every, f"{type(task).__name__}.eval_every =")
    return Every(epochs=1)
