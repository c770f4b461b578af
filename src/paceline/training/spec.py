"""What a training is asked to do, as the launcher hands it to the workers. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import InputError
from paceline.option_fields import Options, flag, option
from paceline.ranges import CLIP, COUNT, STEPS, TASK

OVERRIDES = ("seed", "precision", "micro_batch", "num_workers", "find_unused_parameters")
"""What a task has an opinion on and the command line may say otherwise."""


@dataclass(frozen=True, kw_only=True)
class TrainSpec(Options):
    """Which task, and what the command line says otherwise than the task does; None leaves it to the task."""

    task: str
    name: str
    settings: Mapping[str, str] = field(default_factory=dict)
    epochs: int | None = option(None, "Passes over the data.", within=COUNT, shown="the task's")
    steps: int | None = option(
        None, "End after this step, counted from the beginning of the run.", within=STEPS, shown=""
    )
    horizon: int | None = option(
        None,
        "Steps that the learning-rate schedule is laid out for.",
        within=STEPS,
        shown="the whole run's; a resumed run keeps its own",
    )
    batch_size: int | None = option(None, "Samples of the GLOBAL batch.", within=COUNT, shown="the task's")
    max_grad_norm: float | None = option(
        None, "Largest norm of the global gradient.", within=CLIP, shown="the task's"
    )
    overrides: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in self.overrides.items():
            if name in TASK and value is not None:
                TASK[name].read(flag(name), value)
        if self.epochs is not None and self.steps is not None:
            raise InputError("--epochs and --steps both say when to end. Give one of them.")
