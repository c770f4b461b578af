"""What was measured in the course of a run, read from its events."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from paceline.errors import InputError
from paceline.observe.events import Evaluated, StepFinished, from_json
from paceline.training import folder

_Value = TypeVar("_Value")
_KINDS = tuple(
    json.dumps({"kind": one.kind}, separators=(",", ":"))[:-1] for one in (StepFinished, Evaluated)
)


@dataclass(frozen=True, repr=False)
class History:
    """The run from its first step: also what came before a resume."""

    loss: Mapping[int, float]
    """By step (the first is 1), the mean over the global batch."""
    learning_rate: Mapping[int, float]
    metrics: Mapping[int, Mapping[str, float]]
    """By the step after which the evaluation set was measured, what was found."""

    def __repr__(self) -> str:
        """Return how much there is of it."""
        measured = ", ".join(str(step) for step in self.metrics) or "none"
        return f"History(losses of {len(self.loss)} steps; evaluations after steps: {measured})"


def read_history(out: Path, last: int, end: int | None = None) -> History:
    """Return what the events of a run folder say up to a step, in the first `end` bytes; what was done again counts once."""
    loss: dict[int, float] = {}
    rate: dict[int, float] = {}
    metrics: dict[int, Mapping[str, float]] = {}
    try:
        with (out / folder.EVENTS).open("rb") as file:
            for line in file:
                if end is not None and file.tell() > end:
                    break
                text = line.decode(errors="replace")
                if not text.startswith(_KINDS):
                    continue
                _take(text, loss, rate, metrics)
    except FileNotFoundError:
        pass
    return History(_until(loss, last), _until(rate, last), _until(metrics, last))


def _until(found: Mapping[int, _Value], last: int) -> dict[int, _Value]:
    return {step: found[step] for step in sorted(found) if step <= last}


def _take(
    text: str, loss: dict[int, float], rate: dict[int, float], metrics: dict[int, Mapping[str, float]]
) -> None:
    try:
        event = from_json(text)
    except InputError:  # the last line of a run that was killed may be torn
        return
    if isinstance(event, StepFinished):
        loss[event.step] = event.loss
        if math.isfinite(event.learning_rate):
            rate[event.step] = event.learning_rate
    elif isinstance(event, Evaluated):
        metrics[event.step] = event.metrics
