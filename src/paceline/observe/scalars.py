"""The numbers in an event, under the names that every sink of metrics gives them."""

from __future__ import annotations

from typing import NamedTuple

from paceline.observe.events import EpochFinished, Evaluated, Event, Logged, StepFinished


class Scalars(NamedTuple):
    """Some numbers of one moment."""

    step: int
    time: float
    values: dict[str, float]


def scalars(event: Event) -> Scalars | None:
    """Return the numbers of an event; None for one that has no curve."""
    match event:
        case StepFinished():
            return Scalars(event.step, event.time, _of_step(event))
        case Logged(step=step, time=time, values=values):
            return Scalars(step, time, dict(values))
        case EpochFinished(step=step, time=time, loss=loss):
            return Scalars(step, time, {"epoch/loss": loss})
        case Evaluated(step=step, time=time, metrics=metrics):
            return Scalars(step, time, {f"eval/{name}": value for name, value in metrics.items()})
        case _:
            return None


def _of_step(event: StepFinished) -> dict[str, float]:
    values = {
        "train/loss": event.loss,
        "train/learning_rate": event.learning_rate,
        "train/samples_per_second": event.samples / max(event.seconds, 1e-9),
    }
    if event.gradient_norm is not None:
        values["train/gradient_norm"] = event.gradient_norm
    return values | {f"auxiliary/{name}": value for name, value in event.auxiliary.items()}
