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
        subject = TaskHarness(own, replace(spec, steps=step + 1), epochs)
        return _experiment(subject, run)
    finally:
        engine_of(own).close()


def _experiment(subject: TaskHarness, run: Run) -> Notes:
    data, data_again = (_read(subject) for _ in range(2))
    replica = subject.prepare()
    last = (subject.spec.steps or 1) - 1
    for step in subject.run.steps(subject.feed, steps=last + 1, max_grad_norm=subject.max_grad_norm):
        if step.number < last:
            step.compute(subject.task.loss)
            continue
        _same_weights(replica, run)
        return _notes(subject, replica, run, step.work, data, data_again)
    raise ValueError(f"the training data ended before step {last}")


def _notes(
    subject: TaskHarness,
    replica: Replica,
    run: Run,
    work: StepWork,
    data: dict[int, str],
    data_again: dict[int, str],
) -> Notes:
    bench = StepRunner(subject, replica, work.size)
    shards = [shard for shard in work.shards if shard.batches]
    step_data = {shard.index: digests.of_batch(shard.batches) for shard in shards}
    attempts, repeated = {}, {}
    plain = {}
    for shard in shards:
        attempts[shard.index], plain[shard.index] = bench.attempt(shard)
        repeated[shard.index], _ = bench.attempt(shard)
    first = shards[0]
    unchecked: list[str] = []
    return Notes(
        rank=run.world.rank,
        samples=subject.feed.samples,
        made=subject.made,
        data=data,
        data_again=data_again,
        step_data=step_data,
        attempts=attempts,
        repeated=repeated,
        bent=_tried(
            unchecked,
            "linearity of the backward pass",
            lambda: experiments.bent(bench, first, plain[first.index]),
        )
        or (),
        touched=_tried(unchecked, "whether the loss leaves gradients alone", lambda: bench.touched(first))
        or (),
        parts=_tried(unchecked, "whether the loss is a sum", lambda: experiments.parts(bench, subject)),
        no_kernel=_tried(unchecked, "deterministic kernels", lambda: experiments.no_kernel(bench, first)),
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


def _read(subject: TaskHarness) -> dict[int, str]:
    """Read the first step's data from the beginning, in this process."""
    feed = subject.open_feed(num_workers=0)
    try:
        step: Any = next(iter(feed.epoch(0)), None)
        return {} if step is None else {shard.index: digests.of_batch(shard.batches) for shard in step.shards}
    finally:
        feed.close()


def _same_weights(replica: Replica, run: Run) -> None:
    """Start every worker from the first one's model, so that a difference has only one cause."""
    with torch.no_grad():
        for tensor in [*replica.model.parameters(), *replica.model.buffers()]:
            tensor.copy_(run.world.comm.broadcast(tensor.detach()))
