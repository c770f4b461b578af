"""Schedules that go on once an epoch, or by what an evaluation found: a wrapper tells the run so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from paceline.errors import InputError
from paceline.strategies.guards.schedules import check_parts


class PerEpoch:
    """A schedule that the run steps at the end of each epoch, and not after each update."""

    def __init__(self, schedule: Any) -> None:
        self.schedule = schedule
        self.epochs = 0
        """For how many epochs it has been stepped."""
        for name in ("step", "state_dict", "load_state_dict"):
            if not callable(getattr(schedule, name, None)):
                raise InputError(
                    f"{type(self).__name__} was given a {type(schedule).__name__}, which has no {name}()."
                )
        check_parts(schedule)

    @property
    def optimizer(self) -> Optimizer:
        """Whose rates it moves."""
        return self.schedule.optimizer  # type: ignore[no-any-return]

    def step(self) -> None:
        """Do nothing: this is called after each update."""

    def end_epoch(self, epochs: int, metrics: Mapping[str, float] | None) -> None:
        """Go on to where so many epochs are over; `metrics` is what was measured there, if anything was."""
        while self.epochs < epochs:
            self.epochs += 1
            self._tick(metrics)

    def begin_step(self, epochs: int) -> None:
        """Go on where an epoch was left before its end."""
        if self.epochs < epochs:
            self.end_epoch(epochs, None)

    def _tick(self, metrics: Mapping[str, float] | None) -> None:  # noqa: ARG002
        self.schedule.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the schedule, and how far it is."""
        return {"epochs": self.epochs, "schedule": self.schedule.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take them back."""
        self.epochs = state["epochs"]
        self.schedule.load_state_dict(state["schedule"])


class OnMetric(PerEpoch):
    """A schedule that is given a metric of the evaluation at the end of each epoch (`ReduceLROnPlateau`)."""

    def __init__(self, schedule: Any, metric: str) -> None:
        super().__init__(schedule)
        self.metric = metric

    def begin_step(self, epochs: int) -> None:
        """Raise where an epoch has ended without it: the others may have been told a metric."""
        if self.epochs < epochs:
            raise InputError(
                f"the {type(self.schedule).__name__} was not told {self.metric!r} at the end of epoch {epochs}. Resume "
                "the run from a checkpoint."
            )

    def _tick(self, metrics: Mapping[str, float] | None) -> None:
        name = type(self.schedule).__name__
        if metrics is None:
            raise InputError(
                f"the {name} goes by the metric {self.metric!r}, and nothing was measured at the end of the epoch. Give the task "
                "eval_data() and metrics(), and evaluate after every epoch; a loop of its own gives the schedule to "
                "run.prepare(model, optimizer, scheduler) and calls scheduler.step(metric) itself."
            )
        if self.metric not in metrics:
            raise InputError(
                f"the {name} goes by the metric {self.metric!r}, and metrics() returns {', '.join(sorted(metrics)) or 'none'}. "
                "Give the name of one."
            )
        self.schedule.step(metrics[self.metric])
