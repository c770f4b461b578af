"""What each worker does in the laboratory: train alone up to the step in question, then try that step in many ways."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch

from paceline.strategies.base import StepWork
from paceline.strategies.replica import Replica
from paceline.training.run import Run, engine_of
from paceline.training.spec import TrainSpec
from paceline.verify.proof import digests
from paceline.verify.proof.lab import experiments
from paceline.verify.proof.lab.notes import Notes
from paceline.verify.proof.lab.step_runner import StepRunner
from paceline.verify.proof.task_harness import TaskHarness
from paceline.world import alone

_Result = TypeVar("_Result")


def main(run: Run, spec: TrainSpec, step: int, epochs: int | None = None) -> Notes:
    """Make every experiment on step number `step`, and give the notes."""
    options = replace(engine_of(run).state.options, strategy="single", workers=1, exact=None)
    own = Run(alone(run.world.device.type), options)
    try:
        harness = TaskHarness(own, replace(spec, steps=step + 1), epochs)
        return _experiment(harness, run)
    finally:
        engine_of(own).close()


def _experiment(harness: TaskHarness, run: Run) -> Notes:
    data, data_again = (_read(harness) for _ in range(2))
    made = digests.of_named(harness.make_model().state_dict().items())
    replica = harness.prepared()
    last = (harness.spec.steps or 1) - 1
    for step in harness.steps_to(last + 1):
        if step.number < last:
            step.compute(harness.task.loss)
            continue
        _same_weights(replica, run)
        return _notes(harness, replica, run, step.work, made=made, data=data, data_again=data_again)
    raise ValueError(f"the training data ended before step {last}")


def _notes(
    harness: TaskHarness,
    replica: Replica,
    run: Run,
    work: StepWork,
    **read: Any,
) -> Notes:
    runner = StepRunner(harness, replica, work.size)
    shards = [shard for shard in work.shards if shard.batches]
    step_data = {shard.index: digests.of_batch(shard.batches) for shard in shards}
    attempts, repeated = {}, {}
    plain = {}
    for shard in shards:
        attempts[shard.index], plain[shard.index] = runner.attempt(shard)
        repeated[shard.index], _ = runner.attempt(shard)
    first = shards[0]
    unchecked: list[str] = []
    return Notes(
        rank=run.world.rank,
        samples=harness.loader.samples,
        **read,
        step_data=step_data,
        attempts=attempts,
        repeated=repeated,
        bent=_tried(
            unchecked,
            "linearity of the backward pass",
            lambda: experiments.bent(runner, first, plain[first.index]),
        )
        or (),
        touched=_tried(unchecked, "whether the loss leaves gradients alone", lambda: runner.touched(first))
        or (),
        parts=_tried(unchecked, "whether the loss is a sum", lambda: experiments.parts(runner, harness)),
        no_kernel=_tried(unchecked, "deterministic kernels", lambda: experiments.no_kernel(runner, first)),
        unchecked=tuple(unchecked),
    )


def _tried(unchecked: list[str], what: str, experiment: Callable[[], _Result]) -> _Result | None:
    """Make an experiment that the user's code may not be fit for; what stops it is noted and reported."""
    try:
        return experiment()
    except Exception as error:  # noqa: BLE001  (told to the user as something that was not checked)
        unchecked.append(
            f"{what} ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
        )
        return None


def _read(harness: TaskHarness) -> dict[int, str]:
    """Read the first step's data from the beginning, in this process."""
    loader = harness.open_loader(num_workers=0)
    try:
        step: Any = next(iter(loader.epoch(0)), None)
        return {} if step is None else {shard.index: digests.of_batch(shard.batches) for shard in step.shards}
    finally:
        loader.close()


def _same_weights(replica: Replica, run: Run) -> None:
    """Start every worker from the first one's model, so that a difference has only one cause."""
    with torch.no_grad():
        for tensor in [*replica.model.parameters(), *replica.model.buffers()]:
            tensor.copy_(run.world.comm.broadcast(tensor.detach()))
