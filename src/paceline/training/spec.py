"""What a training is asked to do, as the launcher hands it to the workers. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import InputError

OVERRIDES = ("seed", "precision", "micro_batch", "loader_workers", "allow_unused")
"""What a task has an opinion on and the command line may say otherwise."""


@dataclass(frozen=True, kw_only=True)
class TrainSpec:
    """Which task, and what the command line says otherwise than the task does; None leaves it to the task."""

    task: str
    name: str
    settings: Mapping[str, str] = field(default_factory=dict)
    epochs: int | None = None
    steps: int | None = None
    horizon: int | None = None
    """Steps that a schedule is laid out for; None takes the whole run's, or those the run was begun with."""
    batch_size: int | None = None
    clip: float | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.epochs is not None and self.steps is not None:
            raise InputError("--epochs and --steps both say when to end. Give one of them.")
        for name in ("epochs", "steps", "horizon", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"--{name.replace('_', '-')} is {value}, but must be at least 1.")
        if self.clip is not None and self.clip <= 0:
            raise InputError(f"--clip is {self.clip:g}, but a largest norm must be above 0.")
