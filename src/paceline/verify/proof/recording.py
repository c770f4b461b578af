"""The watched run: trains as `paceline train` does, and digests what every step was made of and came to."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.data.resident import gathered
from paceline.state.chunks import MODEL, TensorChunk, TensorMeta, collect, survey
from paceline.strategies.replica import Replica
from paceline.task import Loss
from paceline.training.run import Run, engine_of
from paceline.training.spec import TrainSpec
from paceline.training.step import Step
from paceline.verify.proof import digests
from paceline.verify.proof.record import Digests, Dump, Record, StepRecord, TorchCall, Watching
from paceline.verify.proof.task_harness import TaskHarness
from paceline.verify.proof.tracing import Tracer, forward_hooks
from paceline.world import World


def main(run: Run, spec: TrainSpec, wanted: Watching | None = None) -> Record:
    """Train the task on this worker and give the record."""
    wanted = wanted or Watching()
    started = time.perf_counter()
    harness = TaskHarness(run, spec, wanted.epochs)
    names = {name for name, _ in harness.make_model().named_parameters()}
    replica = harness.prepared()
    begun = replica.state()["model"]
    start = digests.of_named(begun.items())
    watch = _StepWatch(replica, run, names, wanted.dump, wanted.trace)
    if wanted.dump is not None:
        watch.start = {name: value.clone() for name, value in begun.items()}
    modules: dict[str, None] = {}
    with forward_hooks(replica.model, enter=modules.setdefault if wanted.order else None):
        for step in harness.steps_to(wanted.until or spec.steps):
            watch.step(step, harness.task.loss)
    metrics, unchecked = harness.measure() if wanted.evaluate else ({}, "")
    return Record(
        rank=run.world.rank,
        exactness=str(engine_of(run).state.exactness),
        precision=harness.options.precision,
        start=start,
        steps=watch.steps,
        modules=list(modules),
        metrics=metrics,
        trace=watch.trace,
        unchecked=(unchecked,) if unchecked else (),
        seconds=time.perf_counter() - started,
    )


class _StepWatch:
    """Looks on while steps are computed. The optimizer's own hook is where gradients are final and weights are not."""

    def __init__(
        self, replica: Replica, run: Run, names: set[str], dump: Dump | None, traced: int | None = None
    ) -> None:
        self._replica, self._run, self._dump, self._traced = replica, run, dump, traced
        self.trace: list[TorchCall] = []
        self._names = names
        """Of the parameters, wherever they are; the rest of a model's state is buffers."""
        self._gradients: dict[str, Tensor] = {}
        self._gradient_digests: Digests = {}
        self._rates: tuple[float, ...] = ()
        self._moved = False
        self._number = 0
        self.steps: list[StepRecord] = []
        self.start: dict[str, Tensor] = {}
        """The model as the first step found it, where tensors are to be written down."""
        replica.optimizer.register_step_pre_hook(self._before_update)

    def _before_update(self, optimizer: Optimizer, *_: Any) -> None:
        held = whole_gradients(self._replica, self._run.world)
        self._gradient_digests = digests.of_values(held.items())
        self._rates = rates(optimizer)
        if self._dumping():
            self._gradients = {name: gradient.detach().clone() for name, gradient in held.items()}

    def _dumping(self) -> bool:
        return self._dump is not None and self._number in self._dump.steps

    def step(self, step: Step, loss: Any) -> None:
        """Compute one step and write down what it was."""
        self._number, self._moved = step.number, False
        self._gradient_digests, self._rates = {}, ()  # a step that overflowed in fp16 makes no update
        shards = {shard.index: shard for shard in step.work.shards}
        before = {index: digests.of_batch(shard.batches) for index, shard in shards.items()}

        tracer = (
            Tracer(self._replica.model, {index: gathered(shard.batches) for index, shard in shards.items()})
            if step.number == self._traced
            else None
        )

        def watched(model: nn.Module, batch: Any) -> Loss:
            held = rates(self._replica.optimizer)
            value: Loss = loss(model, batch) if tracer is None else tracer.traced(loss, model, batch)
            self._moved = self._moved or rates(self._replica.optimizer) != held
            return value

        with nullcontext() if tracer is None else tracer.watching():
            result = step.compute(watched)
        self.trace = self.trace if tracer is None else tracer.calls
        totals: dict[int, tuple[str, ...]] = {}
        for index, total in sorted(self._replica.step_state.totals, key=lambda pair: pair[0]):
            totals[index] = (*totals.get(index, ()), float(total).hex())
        after = {index: digests.of_batch(shard.batches) for index, shard in shards.items()}
        state, names = self._replica.state(), self._names
        model = digests.of_named(state["model"].items())
        self.steps.append(
            StepRecord(
                number=step.number,
                epoch=step.epoch,
                samples={index: tuple(shard.samples.tolist()) for index, shard in shards.items()}
                if self._run.world.counts_samples
                else {},
                data=before,
                changed=tuple(index for index in shards if before[index] != after[index]),
                shard_losses=totals,
                loss=result.loss,
                rates=self._rates,
                rates_moved=self._moved,
                gradients=self._gradient_digests,
                weights={name: digest for name, digest in model.items() if name in names},
                optimizer=digests.of_optimizer(state["optimizer"]),
                buffers={name: digest for name, digest in model.items() if name not in names},
            )
        )
        if self._dump is not None and self._dumping():
            self._write(self._dump, state, names, result.loss)

    def _write(self, dump: Dump, state: dict[str, Any], names: set[str], loss: float) -> None:
        torch.save(
            {
                "starting weight": self.start,
                "gradient": self._gradients,
                "weight": {name: value for name, value in state["model"].items() if name in names},
                "buffer": {name: value for name, value in state["model"].items() if name not in names},
                "optimizer state": {
                    f"{parameter}: {key}": value
                    for parameter, entries in state["optimizer"]["state"].items()
                    for key, value in entries.items()
                    if isinstance(value, Tensor)
                },
                "loss": loss,
            },
            dump.path(self._run.world.rank, self._number),
        )
        self._gradients = {}


def whole_gradients(replica: Replica, world: World) -> dict[str, Tensor]:
    """Return the gradients that the coming update takes, whole; where they are sharded all workers ask together."""
    if replica.whole:
        named = replica.model.named_parameters()
        return {name: parameter.grad.to_dense() for name, parameter in named if parameter.grad is not None}
    held = {key: chunk for key, chunk in replica.local_state().chunks.items() if key.startswith(f"{MODEL}/")}
    places: dict[int, str] = {}
    for key, chunk in held.items():
        places.setdefault(chunk.values.data_ptr(), key)  # of tied weights the first name
    chunks = {}
    for parameter in (one for group in replica.optimizer.param_groups for one in group["params"]):
        key = places.get(parameter.data_ptr(), "")
        if parameter.grad is not None and parameter.numel() and key:
            meta = TensorMeta(held[key].meta.shape, parameter.grad.dtype)
            chunks[key] = TensorChunk(parameter.grad.to_dense(), held[key].bounds, meta)
    whole = collect(world, chunks, survey(world, chunks))
    return {key.partition("/")[2]: value for key, value in whole}


def rates(optimizer: Optimizer) -> tuple[float, ...]:
    """Return the learning rate of each group of parameters."""
    return tuple(float(group["lr"]) for group in optimizer.param_groups)
