"""What follows from an evaluation: whether a run goes on, and which of its checkpoints are the best.

Decided from exact metrics, so it is the same on all workers; what is remembered is saved with the run and handed on. Only
evaluations that fall due are judged, not one where a run was cut short: a run that goes on from there decides as if it had not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.declared import EvalInfo
from paceline.errors import InputError
from paceline.scores import is_better
from paceline.task import Task

NAME = "the task's evaluations"
"""The name under which a checkpoint holds them."""


class Judge:
    """The evaluations of a task so far."""

    def __init__(self, task: Task) -> None:
        self.stopping, self.keeping = task.early_stopping, task.keep_best
        self.last: dict[str, float] = {}
        """What the last one that was due has measured."""
        self._judged_at = -1
        self._waited = 0
        self._to_beat: float | None = None
        """The value that early stopping compares with."""
        self._top: tuple[int, float] | None = None
        """The step of the best evaluation and its value."""

    @property
    def stops(self) -> bool:
        """Whether the run is to end where it stands."""
        return self.stopping is not None and self._waited >= self.stopping.patience

    def judge(self, step: int, epoch: int, metrics: Mapping[str, float]) -> EvalInfo | None:
        """Take an evaluation into account; None where it was before."""
        if step == self._judged_at:
            return None
        self._judged_at, self.last = step, dict(metrics)
        if self.stopping is not None:
            value = _value("early_stopping", self.stopping.metric, metrics)
            if self.stopping.improves(value, self._to_beat):
                self._to_beat, self._waited = value, 0
            else:
                self._waited += 1
        rule = self.keeping or self.stopping
        best = False
        if rule is not None:
            value = _value("keep_best", rule.metric, metrics)
            best = is_better(value, self._top and self._top[1], rule.mode)
            self._top = (step, value) if best else self._top
        return EvalInfo(step=step, epoch=epoch, metrics=dict(metrics), is_best=best)

    def best(self) -> dict[str, Any] | None:
        """Return which evaluation was best, for the result of the run."""
        rule = self.keeping or self.stopping
        if rule is None or self._top is None:
            return None
        return {"step": self._top[0], "metric": rule.metric, "value": self._top[1]}

    def state_dict(self) -> dict[str, Any]:
        """Return what is remembered."""
        return {
            "judged at": self._judged_at,
            "last": dict(self.last),
            "waited": self._waited,
            "to beat": self._to_beat,
            "top": None if self._top is None else list(self._top),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Remember what was."""
        self._judged_at, self._waited, self._to_beat = state["judged at"], state["waited"], state["to beat"]
        self.last = dict(state["last"])
        self._top = None if state["top"] is None else (state["top"][0], state["top"][1])


def _value(what: str, metric: str, metrics: Mapping[str, float]) -> float:
    if metric not in metrics:
        raise InputError(
            f"{what} goes by the metric {metric!r}, and metrics() returns {', '.join(sorted(metrics)) or 'none'}. "
            "Give the name of one."
        )
    return metrics[metric]
