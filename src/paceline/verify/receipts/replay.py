"""The re-run of a recorded segment, as each of its workers does it: `paceline train`, with a hash at the recorded steps."""

from __future__ import annotations

from paceline.checkpoint import weights_sha256
from paceline.training.reference import load_task
from paceline.training.run import Run
from paceline.training.spec import OVERRIDES, TrainSpec
from paceline.training.trainer import Trainer


def main(run: Run, spec: TrainSpec, horizon: int | None, points: tuple[int, ...]) -> str:
    """Train up to the last of `points`, saving at each of them; gives the hash of the weights it began with."""
    task = load_task(spec.task, spec.settings)
    run.engine.with_options(**{name: spec.overrides.get(name, getattr(task, name)) for name in OVERRIDES})
    run.engine.state.name = spec.name
    trainer = Trainer(task, spec, run)
    trainer.horizon = horizon
    trainer.prepare()
    began_with = weights_sha256(run.replica.state()["model"])
    for step in run.steps(trainer.feed, steps=spec.steps, max_grad_norm=trainer.max_grad_norm):
        step.compute(task.loss)
        if run.engine.state.position.number in points:
            run.save()
    return began_with
