"""What the steps of a run came to: times, losses, samples; told to the sinks as they happen."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from paceline.checkpoint.terms import EPOCH_TOTAL, EPOCH_WEIGHT
from paceline.observe import (
    EpochFinished,
    Event,
    StepFinished,
)
from paceline.recovery.position import Position
from paceline.strategies.result import StepResult
from paceline.training.step import Step


class Journal:
    """Keeps the numbers of each step. On a GPU a step's numbers are read one step later, so that it never waits."""

    BEGINNING: ClassVar[dict[str, float]] = {"total": 0.0, "weight": 0.0, "samples": 0, "loss": float("nan")}

    def __init__(self, emit: Callable[[Event], None], device: torch.device) -> None:
        self._emit = emit
        self._lag = device.type != "cpu"
        self._waiting: tuple[Step, StepResult, Position, float] | None = None
        self._clock = time.perf_counter()
        self._epoch_total = 0.0
        self._epoch_weight = 0.0
        self.seconds: list[float] = []
        self.samples = 0
        self.loss = float("nan")
        """The mean loss of the last step."""

    def state(self) -> dict[str, float]:
        """Return the sums so far, for a worker that joins and may have to tell them one day."""
        self.read_pending()
        return {
            "total": self._epoch_total,
            "weight": self._epoch_weight,
            "samples": self.samples,
            "loss": self.loss,
        }

    def load(self, state: dict[str, float]) -> None:
        """Continue from the sums of another worker."""
        self._epoch_total, self._epoch_weight = state["total"], state["weight"]
        self.samples, self.loss = int(state["samples"]), state["loss"]

    def epoch_sums(self) -> dict[str, str]:
        """Return the sums of the epoch so far as a checkpoint says them, exactly, also where they are no numbers."""
        self.read_pending()
        return {EPOCH_TOTAL: self._epoch_total.hex(), EPOCH_WEIGHT: self._epoch_weight.hex()}

    def resume(self, meta: Mapping[str, Any]) -> None:
        """Continue from the sums that a checkpoint says; one that says none was written when none were."""
        self._epoch_total = float.fromhex(meta.get(EPOCH_TOTAL, "0"))
        self._epoch_weight = float.fromhex(meta.get(EPOCH_WEIGHT, "0"))

    def start(self) -> None:
        """Start the clock: what comes before belongs to no step."""
        self._clock = time.perf_counter()

    def step(self, step: Step, position: Position) -> None:
        """Take the result of one step."""
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        self.seconds.append(seconds)
        result = step.result
        if result is None:
            raise RuntimeError("a step without a result")
        self.samples += result.size
        if not self._lag:
            self._tell(step, result, position, seconds)
            return
        earlier = self._waiting
        self._waiting = (step, result, position, seconds)
        result.send()
        if earlier is not None:
            self._tell(*earlier)

    def read_pending(self) -> None:
        """Read what is still on its way."""
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            self._tell(*waiting)

    def end_epoch(self, position: Position) -> None:
        """Emit the mean loss of an epoch."""
        self.read_pending()
        mean = self._epoch_total / self._epoch_weight if self._epoch_weight else float("nan")
        self._emit(EpochFinished(epoch=position.epoch - 1, step=position.number, loss=mean))
        self._epoch_total = self._epoch_weight = 0.0

    def leave_epoch(self) -> None:
        """Forget an epoch that was left in the middle."""
        self.read_pending()
        self._epoch_total = self._epoch_weight = 0.0

    def milliseconds(self, share: float) -> float:
        """Return a quantile of the step times, the first step of the process left out."""
        seen = sorted(self.seconds[1:] or self.seconds)
        if not seen:
            return 0.0
        if len(seen) == 1:
            return seen[0] * 1e3
        return statistics.quantiles(seen, n=100, method="inclusive")[round(share * 100) - 1] * 1e3

    def _tell(self, step: Step, result: StepResult, position: Position, seconds: float) -> None:
        if self._lag:
            step.check()
        self.loss, weight, norm, auxiliary = result.read()
        self._epoch_total += self.loss * weight
        self._epoch_weight += weight
        self._emit(
            StepFinished(
                step=position.number,
                epoch=position.epoch,
                loss=self.loss,
                samples=result.size,
                seconds=seconds,
                learning_rate=float(step.learning_rate),
                gradient_norm=norm,
                auxiliary=auxiliary,
            )
        )
