"""What a worker does: jobs one after the other in one world, each in a run of its own, each result in a file."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

import paceline
from paceline.checkpoint import weights_sha256
from paceline.training import trainer
from paceline.training.spec import TrainSpec
from tests.zoo.plain import train_plainly

STEPS = 7
"""Two epochs of 22 samples in batches of 8, the short one included, and a step more."""
HALFWAY = 4
"""In the middle of the second epoch."""
LIMIT_S = 120.0
"""A job that takes longer hangs."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training, but for the layout."""

    key: str
    """Its name, which is also that of its files."""
    task: str
    steps: int = STEPS
    shards: int
    out: Path | None = None
    resume: bool = False
    plain: bool = False
    """Whether a textbook loop does it, and not paceline."""

    def spec(self) -> TrainSpec:
        """Return it as the command line would have it."""
        return TrainSpec(task=self.task, name=self.key, steps=self.steps)


def work(run: paceline.Run, jobs: Sequence[Job], folder: Path) -> None:
    """Do every job; the first that fails ends all of them."""
    for job in jobs:
        with _watched(folder, job, run.world.rank):
            made = train_plainly(run, job) if job.plain else _train(run, job)
        if run.world.rank:
            made[
                "model"
            ] = {}  # the bits of one worker are enough to measure a distance, hashes tell whether they are all
        part = folder / f"{job.key}.{run.world.rank}.part"
        torch.save(made, part)
        os.replace(part, part.with_suffix(".done"))  # noqa: PTH105


def _train(run: paceline.Run, job: Job) -> dict[str, Any]:
    own = paceline.Run(
        run.world, replace(run._engine.state.options, shards=job.shards, out=job.out, resume=job.resume)
    )
    module, _, name = job.task.partition(":")
    made = getattr(importlib.import_module(module), name)
    try:
        if issubclass(made, Loop):
            own._engine.state.options = replace(own._engine.state.options, **made.options)
            metrics = made().train(own, job.steps)
            result = {
                "metrics": metrics,
                "steps": own._engine.state.position.number,
                "loss": own._engine.journal.loss,
            }
        else:
            result = trainer.main(own, job.spec())
        state = own._engine.state.replica.state()
    finally:
        own._engine.loaders.close_all()  # closing the run itself would close the world
    model = {name: tensor.detach().clone() for name, tensor in state["model"].items()}
    kept = _tensors(state["optimizer"]["state"])
    return {
        "model": model,
        "weights": weights_sha256(model),
        "optimizer": weights_sha256(kept) if kept else "",  # plain SGD keeps nothing
        "exactness": str(own._engine.state.exactness),
        **{key: result.get(key) for key in ("metrics", "steps", "samples", "loss")},
    }


class Loop:
    """An exhibit with a loop of its own instead of a Task."""

    options: ClassVar[dict[str, Any]] = {}
    """Of the run, which a Task would have as attributes."""

    def train(self, run: paceline.Run, steps: int) -> dict[str, float]:
        """Train up to this step, and return what is measured at the end."""
        raise NotImplementedError


def _tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    return {
        f"{name}.{key}": value
        for name, entry in state.items()
        for key, value in entry.items()
        if isinstance(value, Tensor)
    }


@contextlib.contextmanager
def _watched(folder: Path, job: Job, rank: int) -> Iterator[None]:
    """Leave word of what has been begun; dump all stacks into the worker's log, and end it, where it never ends."""
    (folder / f"{job.key}.{rank}.begun").touch()
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
