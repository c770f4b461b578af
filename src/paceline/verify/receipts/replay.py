"""The re-run of a recorded segment, as each of its workers does it: `paceline train`, with a hash at the recorded steps."""

from __future__ import annotations

from paceline.checkpoint import weights_sha256
from paceline.training.run import Run, engine_of
from paceline.training.spec import TrainSpec
from paceline.verify.proof.task_harness import TaskHarness


def main(run: Run, spec: TrainSpec, horizon: int | None, points: tuple[int, ...]) -> str:
    """Train up to the last of `points`, saving at each of them; gives the hash of the weights it began with."""
    trainer = TaskHarness(run, spec)
    trainer.horizon = horizon
    began_with = weights_sha256(trainer.prepared().state()["model"])
    state = engine_of(run).state
    for step in trainer.steps_to(spec.steps):
        step.compute(trainer.task.loss)
        if state.position.number in points:
            run.save()
    return began_with
