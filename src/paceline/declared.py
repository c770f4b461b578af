"""What a Task may declare beside its methods, and what its hooks are given: plain values, checked when made."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from paceline.errors import InputError
from paceline.scores import MODES, is_better

# What hooks are given.


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInfo:
    """An optimizer step that was applied."""

    number: int
    """How many steps the run has taken, this one included."""
    epoch: int
    """Which pass over the data it belongs to, from 0."""
    loss: float
    """The mean loss of the global batch."""
    samples: int
    """Of the global batch."""
    learning_rate: float
    """Of the optimizer's first group, when the step was taken."""
    gradient_norm: float | None
    """Of the global batch, before it was clipped; None where `max_grad_norm` is not set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochInfo:
    """A pass over the data that is over, its evaluation included."""

    epoch: int
    """Which one, from 0."""
    step: int
    """How many steps the run has taken."""
    metrics: Mapping[str, float]
    """What the last evaluation measured, empty before the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalInfo:
    """An evaluation."""

    step: int
    epoch: int
    metrics: Mapping[str, float]
    is_best: bool
    """Whether no evaluation before was better by the metric of `early_stopping` or `keep_best`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """A checkpoint that is whole on disk."""

    step: int
    path: str


# What a Task may declare.


@dataclass(frozen=True, slots=True)
class EarlyStopping:
    """End the run when a metric has not become better in `patience` evaluations, one after another."""

    metric: str
    patience: int = 3
    mode: str = "max"
    """Whether larger ("max") or smaller ("min") is better."""
    min_delta: float = 0.0
    """By how much a value must be better than the best one to count."""

    def __post_init__(self) -> None:
        _check("EarlyStopping", self.metric, self.mode)
        if isinstance(self.patience, bool) or not isinstance(self.patience, int) or self.patience < 1:
            raise InputError(
                f"EarlyStopping: patience is {self.patience!r}, but must be a number of evaluations, 1 or more."
            )
        if not (_is_number(self.min_delta) and 0 <= self.min_delta < math.inf):
            raise InputError(f"EarlyStopping: min_delta is {self.min_delta!r}, but must be 0 or more.")

    def improves(self, value: float, best: float | None) -> bool:
        """Return whether a value counts as better than the best one so far; what is infinite or no number never does."""
        return is_better(value, best, self.mode, by=self.min_delta)


@dataclass(frozen=True, slots=True)
class Best:
    """Keep the checkpoints of the `k` best evaluations by a metric, apart from `--keep`."""

    metric: str
    k: int = 1
    mode: str = "max"
    """Whether larger ("max") or smaller ("min") is better."""

    def __post_init__(self) -> None:
        _check("Best", self.metric, self.mode)
        if isinstance(self.k, bool) or not isinstance(self.k, int) or self.k < 1:
            raise InputError(f"Best: k is {self.k!r}, but must be a number of checkpoints, 1 or more.")


@dataclass(frozen=True, slots=True)
class Average:
    """Average the weights over steps: exponentially (EMA), or evenly (SWA) where `decay` is None."""

    decay: float | None = 0.999
    """How much of the average stays at each update; None is the plain mean of what was averaged."""
    start: int = 0
    """How many steps the run takes before the first update."""
    every: int = 1
    """Steps from one update to the next."""
    evaluated: bool = True
    """Whether evaluations and predictions take the averages in place of the weights."""

    def __post_init__(self) -> None:
        decay = self.decay
        if decay is not None and not (_is_number(decay) and 0 <= decay < 1):
            raise InputError(
                f"Average: decay is {decay!r}, but must be from 0 to below 1, or None for the mean."
            )
        for name, least in (("start", 0), ("every", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InputError(
                    f"Average: {name} is {value!r}, but must be a number of steps, {least} or more."
                )

        if not isinstance(self.evaluated, bool):
            raise InputError(f"Average: evaluated is {self.evaluated!r}, but must be True or False.")

    def share(self, step: int) -> float | None:
        """Return how far the average goes towards the weights after so many steps; None where it stays."""
        after = step - self.start
        if after < 1 or after % self.every:
            return None
        return self.every / after if self.decay is None else 1 - self.decay

    def begun(self, steps: int) -> bool:
        """Return whether there has been an update in so many steps."""
        return steps >= self.start + self.every


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check(what: str, metric: str, mode: str) -> None:
    if not isinstance(metric, str) or not metric:
        raise InputError(f'{what} needs the name of a metric: {what}("accuracy").')
    if mode not in MODES:
        raise InputError(f'{what}: mode is {mode!r}, but must be "max" or "min".')


# Metrics beyond means.


@runtime_checkable
class MetricState(Protocol):
    """A metric of one batch that can be put together with those of others: `merge(other)`, or torchmetrics' `merge_state`."""

    def compute(self) -> Any:
        """Return a number, a tensor, or a dict of them."""


@dataclass(frozen=True, slots=True)
class Collected:
    """Values of every sample, for a function that needs all of them at once: a rank correlation, an area under a curve.

    The first dimension of each tensor is the batch. Every worker holds the values of the whole data set while it computes.
    """

    values: tuple[Tensor, ...]
    compute: Callable[..., Any]

    def __init__(self, *values: Tensor, compute: Callable[..., Any]) -> None:
        sizes = {value.shape[0] if value.dim() else None for value in values}
        if not values or len(sizes) != 1 or None in sizes:
            raise InputError(
                f"Collected was given tensors of the shapes {[tuple(value.shape) for value in values]}; each needs one row for "
                "each sample of the batch."
            )
        object.__setattr__(self, "values", tuple(value.detach().to("cpu", copy=True) for value in values))
        object.__setattr__(self, "compute", compute)
