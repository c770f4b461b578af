"""What a training is asked to do, as the launcher hands it to the workers. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from paceline.errors import InputError
from paceline.option_fields import NOT_COMPARED, Options, flag, option
from paceline.ranges import CLIP, COUNT, STEPS, TASK, Range
from paceline.training.by_value import Payload
from paceline.training.launcher_values import LauncherValues
from paceline.training.options import Every

OVERRIDES = ("seed", "precision", "micro_batch", "num_workers", "find_unused_parameters")
"""What a task has an opinion on and the command line may say otherwise."""

_NOT_KEPT = ("shipped", "launcher")


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
    eval_every: int | str | None = option(
        None,
        "Evaluate every so many steps (100) or epochs (1epoch).",
        within=Range(1, STEPS.high),
        shown="the task's; after every epoch and at the end",
        marks=(NOT_COMPARED,),
    )
    predict: Path | None = option(  # noqa: RUF009  (a field)
        None,
        "Write the task's predictions to this .safetensors or .npy file at the end.",
        shown="",
        metavar="FILE",
        marks=(NOT_COMPARED,),
    )
    overrides: Mapping[str, Any] = field(default_factory=dict)
    shipped: Payload | None = field(default=None, repr=False)
    """The Task itself, a class or an instance, where `task` is empty: it lies in no file, or has a state of its own."""
    launcher: LauncherValues = field(default_factory=LauncherValues, repr=False)
    """What the launching process has by name, where workers import the task anew."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eval_every is not None:
            Every.parse(self.eval_every, "--eval-every")
        for name, value in self.overrides.items():
            if name in TASK and value is not None:
                TASK[name].read(flag(name), value)
        if self.epochs is not None and self.steps is not None:
            raise InputError("--epochs and --steps both say when to end. Give one of them.")

    def record(self) -> dict[str, Any]:
        """Return what a run folder keeps of it: plain values, and no code."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name not in _NOT_KEPT}
